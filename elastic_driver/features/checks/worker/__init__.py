"""What a worker does in a node check."""
