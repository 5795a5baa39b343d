"""The job machine: which workers train, where, and what becomes of failures. Pure."""
