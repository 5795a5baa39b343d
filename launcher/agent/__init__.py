"""The agent: one process per host that starts, watches and stops the workers there."""
