"""Mistakes of scripts, told in one line each (docs/common-mistakes.md)."""
