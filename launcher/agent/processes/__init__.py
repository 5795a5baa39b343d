"""Processes of this host: how a worker is born, watched and ended, and what is below it."""
