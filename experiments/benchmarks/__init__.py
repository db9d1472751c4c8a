"""Benchmarks: each prints a table and ends with a line `RESULT {json}`."""
