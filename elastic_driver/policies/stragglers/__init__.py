"""Slow ranks and links, and moving work away from them; pure."""
