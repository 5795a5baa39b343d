"""How an agent gets started on a host."""
