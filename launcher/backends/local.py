"""Agents on this machine: each is a child of the driver's process.

Several names of this machine (localhost, 127.0.0.2, its own name) are separate hosts, each with an
agent of its own. An agent's stdin is a pipe whose other end only this process holds: when the
driver dies, even by SIGKILL, the agents see it close. This process is a child subreaper: what a
killed agent leaves behind becomes its child and is ended here.

The agents of a single host are executed. With several hosts, agents are forked from a process
that has imported for all of them (`shared_parent`). If hosts may come at any time, one more agent
is kept ready, a *spare*, which becomes the agent of the next host (`launcher.agent.spare`).

One thread, started with the first agent, watches for their ends and calls `on_lost`.
"""

import contextlib
import os
import select
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_driver import contract
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.backend import Backend, BackendJob, OnLost
from elastic_driver.runtime.host_lists import Hosts
from launcher.agent.folders import sweep_scratch
from launcher.agent.processes import become_subreaper, carries, children, kill_trees, reap
from launcher.agent.spare import SPARE_FLAG, send_arguments
from launcher.backends.addresses import is_this_machine, meeting_address, own_address
from launcher.backends.base import AgentPlan, agent_arguments, describe_end
from launcher.backends.shared_parent import ForkRequest, SharedParent

_SPARE = ("", 0)  # no host and no incarnation: the key of the agent that waits for them
_AGENT = (sys.executable, "-m", "launcher.agent")
LAST_RESORT_S = 2.0  # for the kernel to end what was killed
_LOOK_AGAIN_S = 0.005


@dataclass(eq=False)
class _RunningAgent:
    """The process of an agent, and the callback for its end."""

    plan: AgentPlan
    on_lost: OnLost
    pid: int
    pidfd: int
    lifeline: int  # the writing end of its stdin
    warm: int | None = None  # the session of the warm parent that was forked with it


class LocalBackend(Backend):
    """Starts agents as children of this process.

    Args:
        endpoint: the rendezvous' URL.
        token_file: the job's token. Its path also marks the processes of this job. An agent
            removes it and the endpoint file beside it when this process dies without doing that.
        address: the address at which other machines reach this one; None: they need not.
        several: there will be agents of more than one host.
        grows: more hosts may come at any time; implies `several`.
        joined: this machine has joined a driver elsewhere, which names it as it likes; its agents
            find their address by themselves.
    """

    def __init__(
        self,
        endpoint: str,
        token_file: Path,
        *,
        address: str | None = None,
        several: bool = False,
        grows: bool = False,
        joined: bool = False,
    ) -> None:
        self._endpoint, self._address = endpoint, address
        self._several, self._grows = several or grows, grows
        self._joined = joined
        self._token_file = token_file.absolute()
        self._env = {contract.TOKEN_FILE: str(self._token_file)}
        self._lock = threading.Lock()
        self._agents: dict[tuple[str, int], _RunningAgent] = {}
        self._requested: dict[tuple[str, int], OnLost] = {}  # the shared parent is to fork them
        self._first: str | None = None  # host that had an agent
        self._shared = SharedParent(endpoint, self._token_file)
        self._none_left = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1

    def plan(self, host: str, incarnation: int) -> AgentPlan:
        """Return what `start` executes; raises ClusterError for another machine's name."""
        if not self._joined and not is_this_machine(host):
            raise ClusterError(
                f"{host} is not this machine, and the local backend starts nothing elsewhere; "
                "name localhost, or choose another --backend"
            )
        address = self._address or (None if self._joined else meeting_address(host))
        token_file = str(self._token_file)
        argv = (
            *(*_AGENT, *agent_arguments(self._endpoint, host, incarnation)),
            *("--token-file", token_file),
            *(() if address is None else ("--address", address)),
            *("--lifeline", "--orphan-file", token_file),
            *("--orphan-file", str(self._token_file.with_name("endpoint.json"))),
        )
        return AgentPlan(host, incarnation, argv, self._env)

    # ---- Backend -------------------------------------------------------------------------

    def describe(self, host: str) -> str:
        """See `Backend.describe`."""
        return shlex.join(self.plan(host, 1).argv)

    def check(self, hosts: Hosts) -> None:
        """See `Backend.check`: another machine would be tried over and over, in vain."""
        for host, slots in hosts:
            if slots and not is_this_machine(host):
                raise UsageError(
                    f"{host} is not this machine, and --backend local starts nothing elsewhere; "
                    "name localhost, or leave the host out"
                )

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        try:
            plan = self.plan(host, incarnation)
            with self._lock:
                if self._closed:
                    return
                self._ensure_thread()
                self._first = self._first or host
                self._several |= host != self._first
                if not self._several:
                    self._execute(plan, on_lost)
                elif not self._give_spare(plan, on_lost):
                    self._requested[host, incarnation] = on_lost
                    self._shared.request(self._fork_request(plan))
                if self._grows:
                    self._order_spare()
        except ClusterError as error:
            on_lost(str(error))
        except OSError as error:
            on_lost(_cannot_start(host, error))

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`."""
        with self._lock:
            on_lost = self._requested.pop((host, incarnation), None)
            agent = self._agents.get((host, incarnation))
            if agent is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(agent.pidfd, signal.SIGKILL)
        if on_lost is not None:
            on_lost(f"the agent on {host} was no longer wanted before it had begun")

    def close(self, grace: float) -> None:
        """See `Backend.close`."""
        with self._lock:
            self._closed = True
            self._requested.clear()
        self._shared.close()
        with self._lock:
            if (spare := self._agents.get(_SPARE)) is not None:
                kill_trees([spare.pid])
            self._none_left.wait_for(lambda: not self._agents, max(grace, 0.0))
            kill_trees(agent.pid for agent in self._agents.values())
            self._none_left.wait_for(lambda: not self._agents, LAST_RESORT_S)
            thread, self._thread = self._thread, None
        if thread is not None:
            os.write(self._wake_write, b"x")
            thread.join(2 * LAST_RESORT_S)
            os.close(self._wake_write)
            become_subreaper(False)

    # ---- starting ------------------------------------------------------------------------

    def _execute(self, plan: AgentPlan, on_lost: OnLost) -> None:
        """Start an agent as a new process; the lock is held. Raises OSError."""
        pid, lifeline = _spawn(plan)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.close(lifeline)  # which ends it
            raise
        self._watch_over(_RunningAgent(plan, on_lost, pid, pidfd, lifeline))

    def _watch_over(self, agent: _RunningAgent) -> None:
        self._agents[agent.plan.host, agent.plan.incarnation] = agent
        os.write(self._wake_write, b"+")

    def _fork_request(self, plan: AgentPlan) -> ForkRequest:
        """Return a request to the shared parent, which calls back on its own thread."""
        key = plan.host, plan.incarnation

        def on_forked(pid: int, warm: int, lifeline: int) -> bool:
            with self._lock:
                if key not in self._requested:
                    return False
                pidfd = os.pidfd_open(pid)
                on_lost = self._requested.pop(key)
                self._watch_over(_RunningAgent(plan, on_lost, pid, pidfd, lifeline, warm))
                return True

        def on_refused() -> None:
            reason = None
            with self._lock:
                on_lost = self._requested.pop(key, None)
                if on_lost is None:
                    return
                try:
                    self._execute(plan, on_lost)
                except OSError as error:
                    reason = _cannot_start(plan.host, error)
            if reason is not None:
                on_lost(reason)

        return ForkRequest(plan, on_forked, on_refused)

    def _order_spare(self) -> None:
        """Have a spare forked when nothing else is, unless there is one; the lock is held."""
        if _SPARE not in self._agents and _SPARE not in self._requested:
            self._requested[_SPARE] = lambda _reason: None
            plan = AgentPlan(*_SPARE, (*_AGENT, SPARE_FLAG), self._env)
            self._shared.request(replace(self._fork_request(plan), can_wait=True))

    def _give_spare(self, plan: AgentPlan, on_lost: OnLost) -> bool:
        """Make the spare this agent; return False if there is none. The lock is held."""
        agent = self._agents.get(_SPARE)
        if agent is None or select.select([agent.pidfd], [], [], 0)[0]:  # or it has just ended
            return False
        del self._agents[_SPARE]
        agent.plan, agent.on_lost = plan, on_lost
        self._agents[plan.host, plan.incarnation] = agent
        with contextlib.suppress(OSError):  # it ends now: the watching thread sees that
            send_arguments(agent.lifeline, plan.argv[len(_AGENT) :])
        return True

    # ---- the watching thread -------------------------------------------------------------

    def _ensure_thread(self) -> None:
        if self._thread is not None:
            return
        become_subreaper()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="local-agents", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Wait for the ends of agents, until `close` writes an x."""
        watched: set[_RunningAgent] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is not None:
                        selector.unregister(key.fd)
                        watched.discard(key.data)
                        self._ended(key.data)
                    elif b"x" in os.read(self._wake_read, 4096):
                        os.close(self._wake_read)
                        return
                with self._lock:
                    fresh = [a for a in self._agents.values() if a not in watched]
                for agent in fresh:
                    selector.register(agent.pidfd, selectors.EVENT_READ, agent)
                    watched.add(agent)

    def _ended(self, agent: _RunningAgent) -> None:
        """Clean up after an agent that has ended, then call its `on_lost`."""
        self._end_orphans(agent.warm)
        sweep_scratch()
        with self._lock:
            code = reap(agent.pid) or 0
            os.close(agent.pidfd)
            os.close(agent.lifeline)
            del self._agents[agent.plan.host, agent.plan.incarnation]
            closed = self._closed
            self._none_left.notify_all()
        if not closed:
            agent.on_lost(describe_end(agent.plan.host, code))

    def _end_orphans(self, warm: int | None) -> None:
        """Kill processes whose agent has ended: our children with this job's mark.

        And those in the session `warm`, of the warm parent that was forked with that agent. Other
        children of this process (a library's user may have some) do not carry it, and what
        still has an agent is that agent's child, not ours.
        """
        deadline = time.monotonic() + LAST_RESORT_S
        orphans: set[int] = set()
        while True:
            here = set(children())
            with self._lock:  # after looking: an agent that was started meanwhile is none of them
                here -= {agent.pid for agent in self._agents.values()}
            orphans = {
                pid
                for pid in here
                if pid in orphans or _session(pid) == warm or carries(pid, self._env)
            }
            kill_trees(orphans)
            if not {pid for pid in orphans if reap(pid) is None} or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_AGAIN_S)


def _spawn(plan: AgentPlan) -> tuple[int, int]:
    """Start it in a session of its own, so that Ctrl-C in our terminal reaches us alone.

    Returns its pid, and the writing end of its stdin: the lifeline, closed on exec by any other
    child of ours.
    """
    stdin, lifeline = os.pipe2(os.O_CLOEXEC)
    try:
        env = {**os.environ, **plan.env}
        process = subprocess.Popen(
            plan.argv, cwd=plan.cwd, env=env, stdin=stdin, start_new_session=True
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(stdin)
    process.returncode = 0  # we reap it ourselves
    return process.pid, lifeline


def _session(pid: int) -> int:
    """Return the session of a child, ended or not; 0 if it was reaped meanwhile."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _cannot_start(host: str, error: OSError) -> str:
    return f"cannot start an agent on {host}: {error}; is the machine out of processes?"


def make_backend(job: BackendJob) -> LocalBackend:
    """Return the backend that is registered as `local`."""
    named = {host for host, slots in job.hosts if slots}
    here = {host for host in named if is_this_machine(host)}
    return LocalBackend(
        job.endpoint,
        job.token_file,
        address=own_address(job.bind_host),
        several=len(here) > 1,
        # Hosts that come are names of this machine if all known ones are.
        grows=job.grows and here == named,
    )
