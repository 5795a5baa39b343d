"""Nodes that start by themselves: one serves the job, the others join it with a secret."""
