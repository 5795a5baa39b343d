"""A seeded, simulated cluster that drives the real core with a clock that only we move."""
