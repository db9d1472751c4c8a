"""Experiments: one file each, `config()` returns a RunConfig."""
