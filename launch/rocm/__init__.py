"""Compiling for AMD GPUs on a machine that has none."""
