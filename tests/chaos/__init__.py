"""A real job in the middle of faults by plan and seed: `python -m benchmarks.chaos`."""
