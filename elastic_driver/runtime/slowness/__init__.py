"""Slow ranks of a running job: which they are, and the work that moves away from them."""
