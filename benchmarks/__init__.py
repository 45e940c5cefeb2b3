"""Benchmarks: each script answers one question and prints machine, commit and date above its table."""
