"""The driver process: the shell around the core."""
