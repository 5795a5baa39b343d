"""Benchmarks: each module prints a table and writes results/<name>.json."""
