"""Tests of what a worker does in a node check."""
