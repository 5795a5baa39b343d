"""The worker side of a node check: timed matrix products, all-gathers and a small transformer."""
