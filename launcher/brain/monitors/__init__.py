"""The monitors of `elasticbrain monitor`: where the figures of machines come from."""
