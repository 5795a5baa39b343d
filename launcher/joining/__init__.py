"""Nodes that start by themselves: which one serves, how the others join, and who may."""
