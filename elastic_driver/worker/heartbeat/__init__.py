"""A worker's heartbeat: one message that renews its leases, reports progress and brings notices."""
