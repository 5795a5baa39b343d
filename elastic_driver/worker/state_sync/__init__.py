"""How ranks come to hold the same state: what `state` is made of, and how it travels."""
