"""Data shards for workers: the ledger, sources of data, messages; pure."""
