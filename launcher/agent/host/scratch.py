"""A folder for the sockets of the workers' `multiprocessing`, which go even if a worker is killed.

A DataLoader's processes hand tensors over by way of a socket in a folder of the temporary folder
(`pymp-…`), which a process that is killed cannot remove. So workers are given one folder for all of
them; it goes with the agent, or, where that is killed too, with the next look of `sweep_scratch`.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.agent.host.held_folder import held_folder, sweep

_PREFIX = "elastic-mp-"  # short, as the paths of sockets may not be long
_LONGEST = 107 - len("/listener-12345678")  # what the path of a socket may hold, unix(7)


@contextlib.contextmanager
def scratch_folder() -> Iterator[str | None]:
    """A folder that lasts as long as this; None where none can be had, then they make their own."""
    sweep_scratch()
    folder = Path(tempfile.gettempdir(), _PREFIX + secrets.token_hex(4))
    with contextlib.ExitStack() as stack:
        made = len(str(folder)) <= _LONGEST
        try:
            if made:
                stack.enter_context(held_folder(folder))
        except OSError:
            made = False
        yield str(folder) if made else None


def sweep_scratch() -> None:
    """Remove what agents of this user left that were killed."""
    sweep(_PREFIX)
