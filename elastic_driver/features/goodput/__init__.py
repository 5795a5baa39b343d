"""Where the time of the worker slots goes."""
