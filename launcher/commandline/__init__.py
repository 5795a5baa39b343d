"""Reads a command line: which value every option has, and the text of `--help`."""
