"""Which nodes are faulty or slow before training, by tasks they run in pairs; pure."""
