"""Lines that a worker writes about itself to its stderr: few, and each a whole sentence."""

import sys

from elastic_driver.words import printable


def say(message: str) -> None:
    """Write one line, marked as ours, in one piece."""
    sys.stderr.write(f"elastic: {printable(message)}\n")
    sys.stderr.flush()
