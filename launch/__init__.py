"""Entry points: `python -m launch.NAME`."""
