"""An agent that is started before it is known for which host: it is told the rest later.

It has everything imported and its warm parent ready, so a host that appears in discovery begins at
once. What it is told, and by whom, is what its command line would have said: one line on its
stdin, the pipe from the driver's process, a JSON list of words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

WHEN_TOLD = "--when-told"  # in place of all other words


def tell(lifeline: int, words: Sequence[str]) -> None:
    """Say it, to the writing end of its stdin; raises OSError where it does not listen any more."""
    os.write(lifeline, json.dumps(list(words)).encode("ascii") + b"\n")


def hear(stdin: int) -> list[str] | None:
    """Wait to be told; None where the driver's process has ended, or needs it no more."""
    heard = bytearray()
    while not heard.endswith(b"\n"):
        piece = os.read(stdin, 4096)
        if not piece:
            return None
        heard += piece
    return [str(word) for word in json.loads(heard)]
