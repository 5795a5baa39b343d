"""Who stands still, and where: what hangs, and the stacks that tell; pure."""
