"""Hostile input for every parser, found by hypothesis (docs/testing.md).

`parsers.py` lists what is read from outside: each parser with inputs that are nearly right, and
with the errors by which it may refuse them. Examples that once broke one stay there for ever.
"""
