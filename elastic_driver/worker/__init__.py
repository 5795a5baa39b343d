"""Inside the training process: rank, world, state."""
