"""Lines that a worker writes about itself to its stderr: few, and each a whole sentence."""

import sys


def say(message: str) -> None:
    """Write one line, marked as ours, in one piece."""
    sys.stderr.write(f"elastic: {message}\n")
    sys.stderr.flush()
