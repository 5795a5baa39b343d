"""Who trains which data shard: the ledger, sources of data, messages; pure."""
