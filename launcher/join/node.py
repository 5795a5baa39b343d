"""A node that joins a job by itself: it finds the server and runs the agents the driver wants.

The node is a self-started agent with a restart loop. It renews a lease in the driver's store and
waits there for its order (`NodeOrder`): when an agent has ended, the node runs the next
incarnation, or leaves with the job's exit status. The agents are ordinary ones. The node is their
parent and adopts what they leave behind, so that nothing outlives it; workers' lines appear on its
terminal.

A first signal goes on to the agent as a notice, so that its workers leave at a step boundary; a
second one ends everything at once. When the server is gone, the node ends its agent and waits for
the server to come back. One thread. Times are seconds.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.core import join_messages as messages
from elastic_driver.core.documents import JobSpec, decode
from elastic_driver.core.join_messages import Joined, NodeOrder, NodeReport
from elastic_driver.errors import ExitCode, UsageError
from launcher import version
from launcher.agent.folders import held_folder, sweep, sweep_scratch
from launcher.agent.processes import become_subreaper, children, end_all
from launcher.agent.remote import start_agent
from launcher.backends.base import PACKAGE_ROOT, agent_arguments, describe_end
from launcher.edge import handled
from launcher.join.find_server import JobServer
from launcher.join.identity import claim_name, machine_id
from launcher.join.secret import of_node
from rendezvous import errors
from rendezvous.auth import write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.wire import MAX_WAIT_S, Entries, Entry, Set, Watch, Written, expect

FOLDER_PREFIX = "elastic-join-"
ORPHANS_S = 5.0  # the time for processes whose agent is gone to end too
GOODBYE_S = 2.0  # the time for the server to take note that we leave
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_decode_order = msgspec.json.Decoder(NodeOrder).decode


@dataclass(frozen=True)
class JoinPlan:
    """The options of a node on its command line."""

    host: str
    port: int
    slots: int | None  # None: as many as the server says
    token_file: str | None
    run_id: str | None
    state_dir: Path
    start_timeout: float
    elastic_timeout: float
    command: tuple[str, ...] = ()  # the command typed here; the server's is the one that runs
    quiet: bool = False

    def render(self) -> str:
        """Return the plan as text for people."""
        slots = "as many as the server says" if self.slots is None else str(self.slots)
        return f"joins       {self.host}:{self.port}\nworkers     {slots}"

    def say(self, sentence: str) -> None:
        """Show a sentence on stderr, unless --quiet was given."""
        if not self.quiet:
            print(f"elasticrun: {sentence}", file=sys.stderr, flush=True)


class _ServerLostError(Exception):
    """The server is gone, or does not know this node any more."""


class _SignalledError(BaseException):
    """A signal came while the node was looking for its server."""


def join(plan: JoinPlan) -> int:
    """Take part in the job until it ends or this node is told to leave; return the exit status.

    Raises ElasticError for what people have to mend.
    """
    node = Node(plan)
    with handled((*_SIGNALS, signal.SIGCHLD), node.on_signal):
        return node.run()


class Node:
    """This process, from its first attempt to join to its end; `run` once."""

    def __init__(self, plan: JoinPlan) -> None:
        self._plan = plan
        self._searching = True
        self._signals: deque[int] = deque()
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._leaving = 0  # the signal for which we leave
        self._agent: subprocess.Popen[bytes] | None = None

    def on_signal(self, number: int) -> None:
        """Stop searching for the server, or wake the loop that runs agents."""
        if number != signal.SIGCHLD:
            if self._searching:
                raise _SignalledError(number)
            self._signals.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"x")

    def run(self) -> int:
        """Join, and join again each time the server was lost; return the exit status."""
        plan = self._plan
        become_subreaper()
        server = JobServer(plan.host, plan.port, self._secrets, plan.say)
        patience, option = plan.start_timeout, "--start-timeout"
        with claim_name(server.place) as name:
            while True:
                session = secrets.token_hex(16)
                offer = NodeReport(name, machine_id(), session, version(), plan.slots)
                try:
                    url, joined = server.join(offer, patience, option)
                    self._searching = False
                except _SignalledError as error:
                    return 128 + int(error.args[0])
                try:
                    with RendezvousClient(url, joined.token, joined.heartbeat_timeout) as client:
                        return self._take_part(client, joined, offer, server.place)
                except _ServerLostError as error:
                    plan.say(str(error))
                self._searching = True
                if self._signals:
                    return 128 + self._signals[0]
                patience, option = plan.elastic_timeout, "--elastic-timeout"

    def _secrets(self) -> tuple[str, ...]:
        plan = self._plan
        return of_node(plan.token_file, plan.run_id, plan.state_dir, plan.port)

    def _take_part(
        self, client: RendezvousClient, joined: Joined, offer: NodeReport, place: str
    ) -> int:
        """Run the job's agents until the job or our part in it ends; return the exit status."""
        plan, reason = self._plan, "this host cannot run the job"
        sweep(FOLDER_PREFIX)
        with held_folder(Path(tempfile.gettempdir(), FOLDER_PREFIX + offer.session)) as folder:
            token_file = write_token_file(folder / "token", joined.token)
            try:
                entry = client.get(contract.JOB_SPEC, wait=GOODBYE_S)
                if entry is None:
                    raise RendezvousError("it has no job")
                check_spec(decode(JobSpec, entry.value), plan)
                slots = f", {plan.slots} slot{'s' * (plan.slots != 1)}" if plan.slots else ""
                plan.say(f"joined run {joined.run_id} at {place} as {joined.name}{slots}")
                code = self._run_agents(client, joined, offer, token_file)
                number = self._leaving
                reason = f"it got {signal.Signals(number).name}" if number else "the job is over"
                return code
            except RendezvousError as error:
                reason = ""
                if self._leaving:
                    return 128 + self._leaving
                raise _ServerLostError(_why_lost(error)) from None
            finally:
                self._end_agent()
                if reason:
                    reason = f"node {joined.name} has left: {reason}"
                    with contextlib.suppress(RendezvousError):
                        _report(client, replace(offer, leaves=True, reason=reason), GOODBYE_S)

    def _run_agents(
        self, client: RendezvousClient, joined: Joined, offer: NodeReport, token_file: Path
    ) -> int:
        """Run one incarnation after the other, as ordered; return the exit status."""
        order, revision, incarnation = NodeOrder(), 0, 0
        order_key = messages.node_order(offer.session)
        lease = Set(messages.node_lease(offer.session), lease=joined.heartbeat_timeout)
        while True:
            entry = _newer(client, lease, order_key, revision, self._wake)
            if entry is not None:
                order, revision = _decode_order(entry.value), entry.revision
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            if order.over is not None:
                if order.over.exit_code != ExitCode.OK:
                    status = f"exit status {order.over.exit_code}"
                    self._plan.say(f"the job has ended with {status}: {order.over.reason}")
                return order.over.exit_code
            if self._agent is not None and order.killed >= incarnation:
                self._agent.kill()
            if self._agent is not None and self._agent.poll() is not None:
                reason = describe_end(joined.name, self._end_agent())
                _report(client, replace(offer, ended=incarnation, reason=reason))
            if self._told_to_leave():
                return 128 + self._leaving
            if self._agent is None and order.incarnation > incarnation:
                incarnation = order.incarnation
                arguments = agent_arguments(client.url, joined.name, incarnation)
                self._agent = start_agent(arguments, token_file, cwd=PACKAGE_ROOT)

    def _told_to_leave(self) -> bool:
        """Pass a first signal on to the agent; return whether to go now."""
        while self._signals:
            number = self._signals.popleft()
            if self._leaving:
                return True
            self._leaving = number
            if self._agent is not None:
                self._plan.say(f"got {signal.Signals(number).name}; once more: leave at once")
                self._agent.send_signal(signal.SIGTERM)
        return bool(self._leaving) and self._agent is None

    def _end_agent(self) -> int:
        """Kill what is left of our agent and below it; return the agent's exit status."""
        agent, self._agent = self._agent, None
        if agent is None:
            return 0
        agent.kill()
        code = agent.wait()
        if agent.stdin is not None:
            agent.stdin.close()
        asyncio.run(end_all(children, ORPHANS_S))
        sweep_scratch()
        return code


def _newer(
    client: RendezvousClient, lease: Set, key: str, revision: int, wake: int
) -> Entry | None:
    """Renew the lease, and wait for a value newer than `revision`; None: there is none yet."""
    patience = client.timeout
    watch = Watch({key: revision}, min(MAX_WAIT_S, patience / 3))
    try:
        renewed, found = client.batch(lease, watch, deadline=patience, wake=wake)
    except errors.WokenError:
        return None
    expect(renewed, Written)
    entries = expect(found, Entries)
    return None if entries.timed_out else entries.entries[key]


def _why_lost(error: RendezvousError) -> str:
    match error:
        case errors.UnauthorizedError():
            return "another run is served there now"
        case errors.SealedError() | errors.RequestError():
            return "the server has given this node up"
        case _:
            return f"lost the server: {error}"


def _report(client: RendezvousClient, report: NodeReport, deadline: float | None = None) -> None:
    client.post_json(messages.NODES_PATH, msgspec.json.encode(report), deadline=deadline)


def check_spec(spec: JobSpec, plan: JoinPlan) -> None:
    """Raise UsageError where this host cannot run the job; say if it is not what was typed."""
    program = spec.command[0]
    if not os.path.isdir(spec.cwd):
        raise UsageError(
            f"the job runs in {spec.cwd}, which does not exist on this host; create it, or start "
            "the server in a folder that all nodes have"
        )
    if os.path.isabs(program) and not os.access(program, os.X_OK):
        raise UsageError(
            f"the job runs {program}, which cannot be executed on this host; install the same "
            "Python at the same path on every node"
        )
    if plan.command and plan.command != spec.command:
        plan.say(f"the job runs what its server was told: {shlex.join(spec.command)}")
