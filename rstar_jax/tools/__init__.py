"""The Python tool: real, isolated processes behind the Tool protocol (floor 1)."""
