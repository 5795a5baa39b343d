"""The stdin of workers: on the machine of `elasticrun` they read its stdin, as torchrun's do.

The agent's own stdin is a pipe to its parent (`processes`), so it inherits the workers' as another
descriptor, whose number is in a variable. Workers lead sessions of their own: a terminal does not
control them, and no read of it stops them. Agents on other machines get none, and their workers
read nothing.
"""

import contextlib
import os
import platform
from collections.abc import Iterator, MutableMapping

VARIABLE = "ELASTIC_WORKER_STDIN"  # of an agent: the number of the descriptor
_READ = {"x86_64": "0", "ppc64le": "3", "s390x": "3"}  # numbers of system calls; elsewhere 63


@contextlib.contextmanager
def of_this_process() -> Iterator[int | None]:
    """Lend a copy of our stdin, for an agent; None if its workers are to read nothing.

    So it is where a shell has started us in the background (`&`): it reads the terminal itself, and
    workers would take its lines.
    """
    copy = None
    with contextlib.suppress(OSError):
        if not (os.isatty(0) and _in_background()):
            copy = os.dup(0)
    try:
        yield copy
    finally:
        if copy is not None:
            os.close(copy)


def _in_background() -> bool:
    with contextlib.suppress(OSError):  # this terminal does not control us
        return os.tcgetpgrp(0) != os.getpgrp()
    return False


def inherit(environ: MutableMapping[str, str]) -> int | None:
    """Return the descriptor that this agent has for its workers; None: they read nothing."""
    number = environ.pop(VARIABLE, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def is_terminal(fd: int | None) -> bool:
    """Return whether a person may answer there; False for None."""
    return fd is not None and os.isatty(fd)


def waits_for_line(pid: int) -> bool:
    """Return whether the main thread of a process waits for its stdin; True if nobody can tell."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            call = file.read().split()
        return call[:2] == [_READ.get(platform.machine(), "63"), "0x0"]
    return True
