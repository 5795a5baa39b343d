"""Tests of nodes that join."""
