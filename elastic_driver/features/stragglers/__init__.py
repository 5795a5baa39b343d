"""Slow ranks and links while the job trains, and ranks whose states differ."""
