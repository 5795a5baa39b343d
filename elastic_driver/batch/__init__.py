"""The fixed global batch: micro-batches, their order, and a seeded permutation; pure."""
