"""Policies beside the job: pure machines, and the arithmetic of batches and shards."""
