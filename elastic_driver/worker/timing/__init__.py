"""The cost of a step to one rank, without the time it waits for other ranks."""
