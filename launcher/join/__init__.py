"""Nodes that start by themselves: how one serves and the others join, and who may."""
