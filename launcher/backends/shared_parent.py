"""One import of torch for all agents of this machine: they are forked from one process.

Several names of one machine are separate hosts with an agent each, and every agent keeps a warm
parent that imports what workers need: seconds of a processor each. `SharedParent` owns one more
process, which imports once; agents are forked from it with their warm parents ready
(`_elastic_warm_shared` is its inside, `launcher.agent.warm.fork_client` the agent's end).

Whatever goes wrong, no agent is lost: the backend starts it the plain way, and a message says once
why. One thread does all of it, since the kernel ends the shared parent with the thread that has
started it. Times are seconds.
"""

import contextlib
import os
import queue
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec, decode
from launcher.agent.warm.command import NotWarmable
from launcher.agent.warm.fork_client import MOST_LAUNCHES, WarmParent, end_child, execute
from launcher.agent.warm.parent._elastic_warm_common import receive_line, send_line
from launcher.agent.warm.plan import plan_for
from launcher.backends.base import AgentPlan
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError, TokenError

WARM_UP_S = 60.0  # longer than importing takes even from a slow network file system
ANSWER_S = 10.0  # for two forks, on a very busy machine
CALM_S = 2.0  # without a request: what can wait takes no processor from the others now
SPEC_S = 5.0  # for the rendezvous to say what the job runs; it was published before
END_S = 2 * SPEC_S  # for the thread to end


@dataclass(frozen=True)
class ForkRequest:
    """A request for an agent to be forked.

    Args:
        plan: what it executes.
        on_forked: called before the agent begins, with its pid, that of its warm parent, and the
            writing end of its stdin; keeps that end and returns True, or returns False if
            the driver does not want the agent any more.
        on_refused: called if none can be forked; the backend starts it some other way.
        can_wait: it is forked once no other request has come for a moment.
    """

    plan: AgentPlan
    on_forked: Callable[[int, int, int], bool]
    on_refused: Callable[[], None]
    can_wait: bool = False


class _LostError(Exception):
    """There is no shared parent; the text says why, and is empty if users need not know."""


class SharedParent:
    """The process and its thread, from the first request to `close`.

    Args:
        endpoint: the rendezvous' URL, which knows what workers run.
        token_file: the job's token.
    """

    def __init__(self, endpoint: str, token_file: Path) -> None:
        self._endpoint, self._token_file = endpoint, token_file
        self._requests: queue.SimpleQueue[ForkRequest | None] = queue.SimpleQueue()
        self._later: deque[ForkRequest] = deque()  # of those, what can wait; its thread's own
        self._thread: threading.Thread | None = None
        self._held: WarmParent | None = None
        self._launches = 0
        self._warm = False  # the newest was, once
        self._lost = False  # for good
        self._ending = threading.Event()
        self._wake_read, self._wake_write = -1, -1

    def request(self, request: ForkRequest) -> None:
        """Have an agent forked as soon as everything is imported; return at once."""
        self._requests.put(request)
        if self._thread is None:
            self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._serve, name="shared-parent", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the process; agents and their warm parents go on. Open requests are dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        self._requests.put(None)
        os.close(self._wake_write)
        thread.join(END_S)
        if not thread.is_alive():
            os.close(self._wake_read)

    # ---- its thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        while (request := self._next()) is not None and not self._ending.is_set():
            try:
                if not self._lost:
                    incarnation = request.plan.incarnation
                    self._held = self._held or self._open(incarnation)
                    self._fork(self._held, request)
                    continue
            except _LostError as error:
                self._lose(str(error))
            except (OSError, EOFError) as error:
                self._lose(f"the process that they are forked from does not answer ({error})")
            except Exception as error:  # or those that wait would never be started
                self._lose(f"a bug of ours: {error!r}")
            if not self._ending.is_set():
                request.on_refused()
        self._end()

    def _next(self) -> ForkRequest | None:
        """Return the next request; None: there will be no more."""
        while True:
            try:
                request = self._requests.get(timeout=CALM_S if self._later else None)
            except queue.Empty:
                return self._later.popleft()
            if request is None or not request.can_wait:
                return request
            self._later.append(request)

    def _lose(self, why: str) -> None:
        """Give the process up, for good if it never was of use or too many were lost."""
        self._lost = not self._warm or self._launches >= MOST_LAUNCHES
        words = "" if self._held is None else self._held.last_words()
        self._end()
        if why and not self._ending.is_set():
            who = (
                "agents on this machine import for themselves from now on"
                if self._lost
                else "an agent on this machine imports for itself, and another process for the next"
            )
            print(f"elasticrun: {who}: {why}{words}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end()

    def _open(self, incarnation: int) -> WarmParent:
        """Start it, and wait until it is warm; raises `_LostError`."""
        try:
            plan = plan_for(self._read_spec(incarnation), os.environ)
        except NotWarmable:
            raise _LostError("") from None  # nothing is warm in this job
        self._launches, self._warm = self._launches + 1, False
        try:
            self._held = execute(plan)
            self._held.status.settimeout(ANSWER_S)
            message = {**plan.first_message(os.getpid()), "shared": plan.digest()}
            send_line(self._held.status, message)
            self._held.status.settimeout(WARM_UP_S)
            if not self._wait_for(self._held.status, WARM_UP_S):
                raise _LostError(
                    f"the process that imports for all was not warm after {WARM_UP_S:.0f} s"
                )
            if "refused" in receive_line(self._held.status):
                raise _LostError("")  # what the agents will find out, too, and say
            self._warm = True
        except (OSError, EOFError) as error:
            raise _LostError(
                f"the process that was to import for all has ended ({error})"
            ) from error
        return self._held

    def _read_spec(self, incarnation: int) -> JobSpec:
        try:
            token = read_token_file(self._token_file)
            with RendezvousClient(self._endpoint, token, timeout=SPEC_S) as client:
                entry = client.get(contract.spec_key(incarnation))
            if entry is None:
                raise _LostError("the rendezvous does not say what the job runs")
            return decode(JobSpec, entry.value)
        except (RendezvousError, TokenError, msgspec.DecodeError) as error:
            raise _LostError(f"cannot learn what the job runs ({error})") from error

    def _fork(self, held: WarmParent, request: ForkRequest) -> None:
        """Have one agent forked; raises OSError or EOFError if none comes."""
        stdin, lifeline = os.pipe2(os.O_CLOEXEC)
        ours, theirs = socket.socketpair()
        with ours, contextlib.ExitStack() as on_error:
            on_error.callback(os.close, lifeline)
            try:
                with theirs:
                    held.queue.settimeout(ANSWER_S)
                    socket.send_fds(held.queue, [b"agent"], [stdin, 1, 2, theirs.fileno()])
            finally:
                os.close(stdin)
            ours.settimeout(ANSWER_S)
            plan = request.plan
            env = {**os.environ, **plan.env}
            send_line(ours, {"argv": plan.argv, "env": env, "cwd": str(plan.cwd)})
            if not self._wait_for(ours, ANSWER_S):
                raise TimeoutError(f"nothing in {ANSWER_S:g} s")
            answer = receive_line(ours)
            if not request.on_forked(int(answer["pid"]), int(answer["warm"]), lifeline):
                for pid in held.own_pids() - {held.pid}:
                    end_child(pid)
                return
            on_error.pop_all()
            with contextlib.suppress(OSError):  # it has died: the backend's thread sees that
                ours.sendall(b"go")

    def _wait_for(self, line: socket.socket, seconds: float) -> bool:
        """Return whether something arrives in time; raises `_LostError` after `close`."""
        ready, _, _ = select.select([line.fileno(), self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            raise _LostError("")
        return bool(ready)
