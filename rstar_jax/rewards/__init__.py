"""Rewards that score a finished trajectory (floor 1)."""
