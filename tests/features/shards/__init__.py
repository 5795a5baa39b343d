"""Tests of data shards."""
