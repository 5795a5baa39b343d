"""An agent that is started before its host is known, and receives its arguments later.

It has imported everything and its warm parent is ready, so a host that appears in discovery begins
at once. The driver's process writes the arguments to the agent's stdin: one line, a JSON list.
"""

import json
import os
from collections.abc import Sequence

SPARE_FLAG = "--when-told"  # in place of all other arguments


def send_arguments(lifeline: int, arguments: Sequence[str]) -> None:
    """Write the arguments to the agent's stdin (`lifeline`); raises OSError if it has ended."""
    os.write(lifeline, json.dumps(list(arguments)).encode("ascii") + b"\n")


def receive_arguments(stdin: int) -> list[str]:
    """Wait for the arguments; empty if the driver's process has ended or needs no spare."""
    with open(stdin, "rb", closefd=False) as pipe:
        line = pipe.readline()
    return [str(word) for word in json.loads(line)] if line.endswith(b"\n") else []
