"""This process: what it was born with, its place in the world now, and its words on stderr."""
