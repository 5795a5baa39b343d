"""Backends: they start an agent on a host."""
