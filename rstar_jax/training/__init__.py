"""Batches, the update step and the train state (floor 2)."""
