"""The Brain: statistics of jobs, and the decisions how many workers each of several jobs gets."""
