"""Runs algorithms for the Brain, each in a child process, so that none can hold it up or end it.

A plan may take `LIMIT_S`. The child that takes longer is killed, with all that it has started in
its group, and the next plan begins with a new one. One thread starts the children and talks to
them.

A child is `python -m elastic_driver.brain.algorithms NAME`. It loads the algorithm of that name and
says so, or why it cannot. Then each line of its stdin is a `View`, which it answers with a line: a
`Plan`, or why there is none. What the algorithm prints goes to stderr. The child ends with its
stdin, so it never outlives its parent, whatever the algorithm does. Its memory is limited, so that
no other process of the machine has to suffer.
"""

import contextlib
import difflib
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import IO, BinaryIO, TypeAlias

import msgspec
from msgspec import Struct

from elastic_driver.brain.algorithm import BUILT_IN, GROUP, LIMIT_S, MEMORY, Algorithm, Plan, View
from elastic_driver.brain.messages import PlanFailed, Planned
from elastic_driver.errors import UsageError

BUILT_IN_PLACE = "elastic_driver.brain.fair:fair"
MOST_WORDS = 500  # characters of a reason
START_S = 20.0  # until a child has loaded its algorithm
CLOSE_S = 0.5  # between the end of a process's pipes and its own
END_S = 2.0  # until a killed child is gone, and this thread with it
MOST_BYTES = 64 * 2**20  # of one answer
_CHUNK = 1 << 16


class Loaded(Struct, frozen=True, tag="loaded"):
    """The algorithm can be asked."""


class Made(Struct, frozen=True, tag="made"):
    """The algorithm has made a plan."""

    plan: Plan


class Failed(Struct, frozen=True, tag="failed"):
    """The algorithm could not be loaded, or has made no plan; `reason` is a phrase."""

    reason: str


Answer: TypeAlias = Loaded | Made | Failed
_decode: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


def entry_points() -> dict[str, metadata.EntryPoint]:
    """Return all algorithms by name; ours is not replaced by that of another package."""
    found = {point.name: point for point in metadata.entry_points(group=GROUP)}
    return found | {BUILT_IN: metadata.EntryPoint(BUILT_IN, BUILT_IN_PLACE, GROUP)}


class Algorithms:
    """The algorithms that the Brain asks, by their names; "" is the built-in one.

    `limit` is the time for one plan, in seconds.
    """

    def __init__(self, limit: float = LIMIT_S) -> None:
        self._limit = limit
        self._children: dict[str, _Child] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="algorithms", daemon=True)
        self._thread.start()

    def check(self, name: str) -> None:
        """Raise UsageError if there is no such algorithm, or if it cannot be loaded."""
        known = entry_points()
        name = name or BUILT_IN
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise UsageError(f"--algorithm {name}: there is no such algorithm; {hint}")
        checked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._work.put(lambda: checked.put(self._child(name).problem))
        try:
            problem = checked.get(timeout=START_S + END_S)
        except queue.Empty:
            problem = f"nothing within {START_S:g} s"
        if problem:
            hint = "mend the package that it belongs to, or install it again"
            raise UsageError(f"--algorithm {name}: it cannot be loaded ({problem}); {hint}")

    def ask(
        self, request: int, name: str, view: View, done: Callable[[Planned | PlanFailed], None]
    ) -> None:
        """Have an algorithm make a plan; `done` is called with it, or with why there is none."""

        def work() -> None:
            answer = self._child(name or BUILT_IN).ask(view, self._limit)
            if isinstance(answer, Made):
                done(Planned(request, answer.plan))
            else:
                done(PlanFailed(request, answer.reason))

        self._work.put(work)

    def close(self) -> None:
        """End all children; plans that were asked for do not come any more."""
        self._closing = True
        self._work.put(None)
        for child in list(self._children.values()):
            child.kill()
        self._thread.join(self._limit + END_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._closing:
            work()
        for child in self._children.values():
            child.end()

    def _child(self, name: str) -> "_Child":
        """Return a living child for an algorithm, or one that says why there is none."""
        child = self._children.get(name)
        if child is not None and child.lives:
            return child
        if child is not None:
            child.end()
        self._children[name] = _Child(name)
        return self._children[name]


class _Child:
    """A process that runs one algorithm. `problem`: why it could not be loaded; "": it was."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "elastic_driver.brain.algorithms", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.problem = ""
        loaded = self._exchange(b"", START_S)
        if not isinstance(loaded, Loaded):
            self.problem = loaded.reason if isinstance(loaded, Failed) else "it did not load"
            self.end()

    @property
    def lives(self) -> bool:
        """Whether the process can be asked."""
        return self._process.returncode is None and not self._has_exited()

    def ask(self, view: View, limit: float) -> Made | Failed:
        """Return the plan for a view, or why there is none within the limit."""
        if self.problem:
            return Failed(f"it cannot be loaded ({self.problem})")
        answer = self._exchange(msgspec.json.encode(view) + b"\n", limit)
        return answer if isinstance(answer, Made | Failed) else Failed("returned no plan")

    def _has_exited(self) -> bool:
        """Return whether the process is over; it stays a zombie, so that its group has a name."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def kill(self) -> None:
        """Kill the process and its group; another thread may read from it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and free what belongs to it."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def _exchange(self, line: bytes, limit: float) -> Answer:
        """Send a line, and return the next answer; the process is over if there is none in time."""
        try:
            return _decode(self._answer_line(line, time.monotonic() + limit))
        except TimeoutError:
            why = f"took longer than {limit:g} s"
        except (OSError, EOFError):
            until = time.monotonic() + CLOSE_S
            while not (exited := self._has_exited()) and time.monotonic() < until:
                time.sleep(0.01)
            self.end()
            ended = f"its process has ended ({_how(self._process.returncode)})"
            why = ended if exited else "its process has closed its pipes"
        except msgspec.MsgspecError as error:
            why = f"returned no plan ({error})"
        self.end()
        return Failed(why)

    def _answer_line(self, line: bytes, until: float) -> bytes:
        to, by = self._process.stdin, self._process.stdout
        if to is None or by is None:
            raise EOFError
        answer = b""
        with selectors.DefaultSelector() as selector:
            _watch(selector, by, selectors.EVENT_READ)
            if line:
                _watch(selector, to, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                if not (ready := selector.select(max(0.0, until - time.monotonic()))):
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is by:
                        answer += _read(by)
                    else:
                        line = line[os.write(to.fileno(), line[:_CHUNK]) :]
                        if not line:
                            selector.unregister(to)
                if len(answer) > MOST_BYTES:
                    raise EOFError
        return answer


def _watch(selector: selectors.DefaultSelector, stream: IO[bytes], what: int) -> None:
    os.set_blocking(stream.fileno(), False)
    selector.register(stream, what)


def _read(stream: IO[bytes]) -> bytes:
    """Return what a pipe has; raises EOFError at its end."""
    if found := os.read(stream.fileno(), _CHUNK):
        return found
    raise EOFError


def _how(status: int | None) -> str:
    if status is None:
        return "it cannot be killed"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


# ---- the child -----------------------------------------------------------------------------


def run_child(name: str) -> None:
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
        answer = _answer_to(algorithm, line)
        if os.getpid() != own:
            os._exit(0)  # the algorithm has forked, and this is the other process
        _say(answers, answer)


def _answer_to(algorithm: Algorithm, line: bytes) -> Answer:
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
    run_child(sys.argv[1])
