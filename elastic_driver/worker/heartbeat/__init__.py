"""A worker's contact with the driver: that it lives, how far it is, and what it is told."""
