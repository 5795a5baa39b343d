"""What `core.shards` hands out and is told: sources of data and messages; pure."""
