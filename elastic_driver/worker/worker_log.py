"""Lines a worker writes to its stderr about itself: rare, one at a time, each a whole sentence."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Write one line, marked as ours, without splitting it among other processes' lines."""
    sys.stderr.write(f"elastic: {message}\n")
    sys.stderr.flush()
