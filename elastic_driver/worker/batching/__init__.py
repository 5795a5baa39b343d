"""The work behind `batches`: loading micro-batches, sharing them, summing their gradients."""
