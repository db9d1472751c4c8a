"""Prompt and demonstration sources (floor 2)."""
