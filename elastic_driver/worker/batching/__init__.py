"""What `batches` is made of: whose micro-batches, in which order, how gradients add up."""
