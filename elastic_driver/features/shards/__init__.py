"""Shards of a large data set, which the driver gives to workers."""
