"""Advantages, objectives, selection rules, filters and statistics as pure functions (floor 1)."""
