"""Checkpoints, metrics, trajectories on disk and the report (floor 2)."""
