"""Durable checkpoints: taken by all ranks together, written in the background."""
