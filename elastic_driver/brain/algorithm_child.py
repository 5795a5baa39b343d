"""The process that runs one algorithm: `python -m elastic_driver.brain.algorithm_child NAME`.

It loads the algorithm of that name and says so, or why it cannot. Then each line of its stdin is a
`View`, which it answers with a line: a `Plan`, or why there is none. What the algorithm prints goes
to stderr.
The process ends with its stdin, so it never outlives its parent, whatever the algorithm does. Its
memory is limited, so that no other process of the machine has to suffer.
"""

import contextlib
import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib import metadata
from typing import BinaryIO, TypeAlias

import msgspec
from msgspec import Struct

from elastic_driver.brain.algorithm import BUILT_IN, GROUP, MEMORY, Algorithm, Plan, View

BUILT_IN_PLACE = "elastic_driver.brain.fair:fair"
MOST_WORDS = 500  # characters of a reason


class Loaded(Struct, frozen=True, tag="loaded"):
    """The algorithm can be asked."""


class Made(Struct, frozen=True, tag="made"):
    """The algorithm has made a plan."""

    plan: Plan


class Failed(Struct, frozen=True, tag="failed"):
    """The algorithm could not be loaded, or has made no plan; `reason` is a phrase."""

    reason: str


Answer: TypeAlias = Loaded | Made | Failed


def entry_points() -> dict[str, metadata.EntryPoint]:
    """Return all algorithms by name; ours is not replaced by that of another package."""
    found = {point.name: point for point in metadata.entry_points(group=GROUP)}
    return found | {BUILT_IN: metadata.EntryPoint(BUILT_IN, BUILT_IN_PLACE, GROUP)}


def main(name: str) -> None:
    """Load the algorithm and answer until stdin ends."""
    own = os.getpid()
    with contextlib.suppress(ValueError):  # it has less already
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "wb")
    lines = _lines(os.fdopen(os.dup(0), "rb"))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what the algorithm prints is no answer
    try:
        algorithm: Algorithm = entry_points()[name].load()
    except BaseException as error:  # another package's code may raise anything, SystemExit too
        _say(answers, Failed(_phrase(error)))
        return
    if not callable(algorithm):
        _say(answers, Failed(f"it is no function but a {type(algorithm).__name__}"))
        return
    _say(answers, Loaded())
    for line in lines:
        answer = _answer(algorithm, line)
        if os.getpid() != own:
            os._exit(0)  # the algorithm has forked, and this is the other process
        _say(answers, answer)


def _answer(algorithm: Algorithm, line: bytes) -> Answer:
    view = msgspec.json.decode(line, type=View)
    try:
        plan = algorithm(view)
    except BaseException as error:
        return Failed(f"raised {_phrase(error)}")
    if not isinstance(plan, Plan):
        return Failed(f"returned no plan but a {type(plan).__name__}")
    return Made(plan)


def _say(answers: BinaryIO, answer: Answer) -> None:
    try:
        line = msgspec.json.encode(answer)
        msgspec.json.decode(line, type=Answer)
    except Exception as error:
        line = msgspec.json.encode(Failed(f"returned a plan that cannot be read: {error}"))
    answers.write(line + b"\n")
    answers.flush()


def _phrase(error: BaseException) -> str:
    """Return what was raised and where, in one line."""
    words = " ".join(str(error).split())[:MOST_WORDS]
    place = ""
    if frames := traceback.extract_tb(error.__traceback__):
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {words}{place}"


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Read lines in a thread, which ends this process when there are no more."""
    found: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            found.put(line)
        os._exit(0)

    threading.Thread(target=read, name="views", daemon=True).start()
    return iter(found.get, None)


if __name__ == "__main__":
    main(sys.argv[1])
