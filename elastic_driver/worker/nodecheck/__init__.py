"""What a node check runs in a worker: timed products, gathers and a small transformer."""
