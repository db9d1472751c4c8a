"""The loops of a run, each readable from top to bottom (floor 3)."""
