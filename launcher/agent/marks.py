"""The marks by which a driver knows our own words in what comes over ssh, srun or mpirun.

A login shell runs the user's login files before our command, with the same streams. They may print
anything, with or without a newline at its end, and may leave processes that go on printing. So a
mark counts wherever it stands in the stream. None of them stands in the command line, which a shell
may be told to show.
"""

import contextlib
import os
import re

REACHED = b"elastic-login-over"  # /bin/sh says it first: the login files are done
SAY_REACHED = "printf '%s-%s\\n' elastic login-over"
_REACHED = re.compile(re.escape(REACHED) + rb"\r?\n")

UP = "elastic-agent-up"  # `UP name empty`: the agent was started, or is waited for
LOOKED = "elastic-look"  # `LOOKED {…}`: the findings of `look`
DONE = "elastic-done"  # `DONE name status`: our command has ended, whatever holds its streams

NO_STDOUT = 83  # an exit status: what we print does not reach the driver


def after_login(said: bytes) -> tuple[bytes, bytes] | None:
    """Return what was printed before our command ran, and after; None: it does not run yet."""
    found = _REACHED.search(said)
    return None if found is None else (said[: found.start()], said[found.end() :])


def up_in(line: bytes, name: str) -> int | None:
    """Return how many empty lines have reached an agent that is up; None: it is not.

    Those that were sent and are missing were read by a login file.
    """
    found = re.search(rb"%s %s(?: (\d{1,6}))?\s*$" % (UP.encode(), re.escape(name.encode())), line)
    return None if found is None else int(found[1] or 0)


def done_in(line: bytes, name: str) -> tuple[bytes, int] | None:
    """Return what stands before the mark of our command's end, and its exit status."""
    found = re.search(rb"%s %s (\d{1,3})\s*$" % (DONE.encode(), re.escape(name.encode())), line)
    return None if found is None else (line[: found.start()], int(found[1]))


def say(mark: str, *words: object) -> None:
    """Print a mark and its words in one write; raises OSError if nobody is there to read it.

    `print` writes word by word with PYTHONUNBUFFERED, and a process that a login file has left
    could print between them.
    """
    os.write(1, (" ".join([mark, *map(str, words)]) + "\n").encode())


def say_done(name: str, status: int) -> None:
    """Print the mark of our command's end; nobody may be there to read it."""
    with contextlib.suppress(OSError):
        say(DONE, name, status)
