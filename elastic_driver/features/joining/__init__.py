"""Nodes that join a job by themselves."""
