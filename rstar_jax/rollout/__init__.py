"""The engine of slots, the agent coroutine and the collection of groups (floor 2)."""
