"""Shards in a worker's script."""
