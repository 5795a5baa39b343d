"""A node that joins a job by itself: it finds the server and runs the agents the driver wants.

The node is a self-started agent with a restart loop. It renews a lease in the driver's store and
waits there for its order (`NodeOrder`): when an agent has ended, the node runs the next
incarnation, or leaves with the job's exit status. The agents are ordinary ones. The node is their
parent and adopts what they leave behind, so that no process outlives it; workers' lines appear on
its terminal.

A first signal goes on to the agent as a notice, so that its workers leave at a step boundary.
Ctrl-C after that ends everything at once; other signals are about the same leaving.

The drivers of a job follow one another, and each has a *term* (`job/driver`). When one dies, the
node keeps its agent and its place (`Membership`) for `driver_timeout`: to a driver with a higher
term it says who it is, and delivers the reports that nobody has taken. A driver with a lower term
was replaced; it is ignored. When its place is lost, the node ends its agent, and waits for the
server to come back. One thread. Times are seconds.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.errors import ExitCode, UsageError
from elastic_driver.options import masked
from elastic_driver.words import joining as messages
from elastic_driver.words.joining import Joined, NodeOrder, NodeReport
from elastic_driver.words.orders import JobSpec, Reader, decode
from launcher import version
from launcher.agent.driver_link import term_in
from launcher.agent.folders import held_folder, sweep, sweep_scratch
from launcher.agent.processes import become_subreaper, children, end_all
from launcher.agent.remote import start_agent
from launcher.backends.base import PACKAGE_ROOT, agent_arguments, describe_end
from launcher.edge import TO_LEAVE, handled
from launcher.join.driver_search import FoundServer, JoinPlan, claim_name, find_server
from launcher.network import machine_id
from rendezvous import errors
from rendezvous.auth import Credentials, write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.wire import MAX_WAIT_S, Entries, Entry, Get, Result, Set, Watch, Written, expect

# ---- its place in the job -----------------------------------------------------------------


SPEC_S = 2.0  # for the job's specification, which is there already
REPORT_S = 3.0  # for one attempt to deliver a report, if another driver may come
STRANGER_PAUSE_S = 0.2  # before the next question to a driver that was replaced
_NOTHING = Entry(b"", 0)
_decode_order = msgspec.json.Decoder(NodeOrder).decode
_decode_joined = msgspec.json.Decoder(Joined).decode


def send_report(
    client: RendezvousClient,
    report: NodeReport,
    deadline: float | None = None,
    wake: int | None = None,
) -> Joined:
    """Send a report to the driver; return its answer. Raises RendezvousError, DecodeError.

    Raises WokenError if `wake` becomes readable before.
    """
    body = msgspec.json.encode(report)
    return _decode_joined(client.post_json(messages.NODES_PATH, body, deadline, wake))


class Membership:
    """The place of a node that has joined; every method but `leave` may raise RendezvousError.

    Then the place is lost: the driver has given this node up, or no other one came in time.
    """

    def __init__(
        self,
        client: RendezvousClient,
        joined: Joined,
        offer: NodeReport,
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self.joined = joined
        self._offer = offer
        self.order = NodeOrder()  # the newest
        spec = Get((contract.JOB_SPEC,), wait=SPEC_S)
        driver = Get((contract.JOB_DRIVER,))
        found, drivers = (expect(result, Entries) for result in client.batch(spec, driver))
        self._reader = Reader(say)
        value = found.entries.get(contract.JOB_SPEC, _NOTHING).value
        as_spec: Callable[[bytes], JobSpec] = partial(decode, JobSpec)
        job = self._reader.read(as_spec, contract.JOB_SPEC, value) if value else None
        if job is None:
            raise errors.RendezvousError("it has no job")
        self.spec = job
        self._term = term_in(drivers, self._reader)
        self._reports: list[NodeReport] = []  # that no driver has taken
        self._seen = self._seen_driver = 0  # revisions

    @property
    def waits(self) -> bool:
        """True if this place outlives the driver."""
        return self.spec.driver_timeout > 0

    def await_order(self, wake: int) -> NodeOrder:
        """Renew the lease and wait for an order; return the newest one.

        It may be the one before: the wait has a bound, and ends if `wake` becomes readable.
        """
        self._deliver()
        patience, node = self._client.timeout, (self.joined.name, self._offer.session)
        key = messages.node_order(*node)
        lease = Set(messages.node_lease(*node), lease=self.joined.heartbeat_timeout)
        known = {key: self._seen, contract.JOB_DRIVER: self._seen_driver}
        watch = Watch(known, wait=min(MAX_WAIT_S, patience / 3))
        asked = lease, watch, Get((contract.JOB_DRIVER,)), Get((key,))
        try:
            results = self._client.batch(*asked, deadline=self._deadline, wake=wake)
            self._take_in(results, key, wake)
        except errors.WokenError:
            self._check_silence()
        return self.order

    def _take_in(self, results: Sequence[Result], key: str, wake: int) -> None:
        """Take the newest order under a key, or the same place with a driver of a higher term."""
        expect(results[0], Written)
        driver = expect(results[2], Entries)
        found = expect(results[3], Entries)
        term = term_in(driver, self._reader, self._term)
        if term < self._term:
            time.sleep(STRANGER_PAUSE_S)
        elif term > self._term:
            self._return_to(term, wake)
        else:
            self._seen_driver = driver.entries[contract.JOB_DRIVER].revision if term else 0
            if (entry := found.entries.get(key)) is not None:
                self._seen = entry.revision
                self.order = self._reader.read(_decode_order, key, entry.value) or self.order

    def report_end(self, incarnation: int, reason: str) -> None:
        """Report that an agent has ended; to the next driver, if this one is away."""
        self._reports.append(replace(self._offer, ended=incarnation, reason=reason))
        self._deliver()

    def leave(self, reason: str, deadline: float) -> None:
        """Tell the driver that this node leaves, if it answers in time."""
        with contextlib.suppress(errors.RendezvousError):
            send_report(self._client, replace(self._offer, leaves=True, reason=reason), deadline)

    @property
    def _deadline(self) -> float:
        return max(self._client.timeout, self.spec.driver_timeout)

    def _check_silence(self) -> None:
        since = self._client.silent_since
        if since is not None and (silence := time.monotonic() - since) > self._deadline:
            raise errors.UnreachableError(self._client.url, silence, "it is gone")

    def _deliver(self) -> None:
        while self._reports and not (self.waits and self._client.silent_since is not None):
            try:
                send_report(self._client, self._reports[0], REPORT_S if self.waits else None)
            except errors.UnreachableError:
                if not self.waits:
                    raise
                return
            except errors.RequestError as error:
                if not self.waits or error.code != messages.NOT_JOINED:
                    raise
                return  # another driver, to which this node has not said yet who it is
            del self._reports[0]

    def _return_to(self, term: int, wake: int) -> None:
        """Take the same place with a driver of a higher term, which may die meanwhile, too."""
        back = replace(self._offer, joined_as=self.joined.name)
        answer = send_report(self._client, back, self._deadline, wake)
        if answer.name != self.joined.name:
            raise errors.RendezvousError(f"this node has another name there, {answer.name}")
        self._term = term
        self._seen = 0
        self._seen_driver = 0
        self._deliver()


# ---- the node -----------------------------------------------------------------------------


FOLDER_PREFIX = "elastic-join-"
DRIVER_FILE = "driver"  # holds the address of a driver that has taken over
ORPHANS_S = 5.0  # the time for the processes of a dead agent to end
GOODBYE_S = 2.0  # the time to tell the server that we leave
_SIGNALS = (signal.SIGINT, signal.SIGHUP, *TO_LEAVE)


@dataclass(eq=False)
class _Agents:
    """The job's agents on this node, or those of its node checks: one after the other."""

    incarnation: int = 0  # the newest that was begun
    agent: subprocess.Popen[bytes] | None = None  # that runs

    def has_ended(self) -> bool:
        """Return whether there is an agent whose process has ended."""
        return self.agent is not None and self.agent.poll() is not None


def join(plan: JoinPlan) -> int:
    """Take part in the job until it ends or a signal ends this node; return the exit status.

    Raises ElasticError for a problem that the user has to solve.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a node joins a job in the main thread only, which gets its signals")
    node = Node(plan)
    with handled((*_SIGNALS, signal.SIGCHLD), node.on_signal):
        return node.run()


class Node:
    """A node, from its first attempt to join to the end of its process; `run` is called once."""

    def __init__(self, plan: JoinPlan) -> None:
        self._plan = plan
        self._searching = True
        # The interpreter writes the number of each signal here, which ends a wait for the driver.
        self._wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._leaving = 0  # the signal for which we leave
        self._job = _Agents()
        self._checks = _Agents()

    def on_signal(self, number: int) -> None:
        """End this process while it searches for the server; later `_run_agents` sees signals."""
        if self._searching and number != signal.SIGCHLD:
            raise SystemExit(128 + number)

    def _signals(self) -> list[int]:
        """Return the signals since the last call, in their order."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._wake, 4096) if number != signal.SIGCHLD]
        return []

    def run(self) -> int:
        """Join, and join again each time the server was lost; return the exit status."""
        plan = self._plan
        become_subreaper()
        patience, option = plan.settings.start_timeout, "--start-timeout"
        run = (plan.options.run_id,) if plan.options.run_id else ()  # wherever its server is
        with claim_name((plan.place, *run), os.environ, plan.say) as name:
            while True:
                session = secrets.token_hex(16)
                offer = NodeReport(name, machine_id(), session, version(), plan.slots)
                found = find_server(plan, offer, patience, option)
                self._searching = False
                code = self._take_part(found, offer)
                if code is not None:
                    return code
                self._searching = True
                for number in self._signals():
                    return 128 + number
                patience, option = plan.settings.elastic_timeout, "--elastic-timeout"

    def _take_part(self, found: FoundServer, offer: NodeReport) -> int | None:
        """Run the job's agents until the job or our part in it ends.

        Return the exit status, or None if the server was lost.
        """
        plan = self._plan
        reason = "this host cannot run the job"
        place = None
        joined = found.joined
        self._job = _Agents()
        self._checks = _Agents()
        sweep(FOLDER_PREFIX)
        name = FOLDER_PREFIX + offer.session
        with (
            held_folder(Path(tempfile.gettempdir(), name)) as folder,
            found.client(folder / DRIVER_FILE) as client,
        ):
            try:
                place = Membership(client, joined, offer, plan.say)
                check_spec(place.spec, plan)
                slots = f", {plan.slots} slot{'s' * (plan.slots != 1)}" if plan.slots else ""
                plan.say(f"joined run {joined.run_id} at {plan.place} as {joined.name}{slots}")
                token = Credentials(joined.agent_token, found.fingerprint)
                code = self._run_agents(client, place, folder, token)
                number = self._leaving
                reason = f"it got {signal.Signals(number).name}" if number else "the job is over"
                return code
            except errors.RendezvousError as error:
                reason = ""
                if self._leaving:
                    return 128 + self._leaving
                plan.say(_why_lost(error))
                lonely = isinstance(error, errors.UnreachableError)
                if lonely and place is not None and place.waits:
                    self._let_agent_leave(place.spec.grace_period)
                return None
            finally:
                for agents in (self._job, self._checks):
                    self._end_agent(agents)
                if reason and place is not None:
                    place.leave(f"node {joined.name} has left: {reason}", GOODBYE_S)

    def _run_agents(
        self, client: RendezvousClient, place: Membership, folder: Path, token: Credentials
    ) -> int:
        """Run one incarnation after the other, as ordered; return the exit status."""
        name = place.joined.name
        while True:
            order = place.await_order(self._wake)
            if order.over is not None:
                if order.over.exit_code != ExitCode.OK:
                    status = f"exit status {order.over.exit_code}"
                    self._plan.say(f"the job has ended with {status}: {order.over.reason}")
                return order.over.exit_code
            signals = self._signals()
            job = self._job
            checks = self._checks
            for agents, killed in ((job, order.killed), (checks, order.check_killed)):
                if agents.agent is not None and killed >= agents.incarnation:
                    agents.agent.kill()
                if agents.has_ended():
                    reason = describe_end(name, self._end_agent(agents))
                    place.report_end(agents.incarnation, reason)
            if self._told_to_leave(signals):
                return 128 + self._leaving
            for agents, wanted in ((job, order.incarnation), (checks, order.check)):
                if agents.agent is None and wanted > agents.incarnation:
                    agents.incarnation = wanted
                    arguments = agent_arguments(client.url, name, wanted)
                    if address := self._plan.options.local_addr:
                        arguments += ("--address", address)
                    # An agent is told by a driver that takes over elsewhere, and tells us.
                    arguments += ("--driver-file", str(folder / DRIVER_FILE))
                    # Written again, as an agent that has lost its driver removes it.
                    token_file = write_token_file(folder / "token", token.token, token.fingerprint)
                    agents.agent = start_agent(arguments, token_file, cwd=PACKAGE_ROOT)

    def _let_agent_leave(self, notice: float) -> None:
        """Wait for an agent that has no driver any more either, and stops its workers."""
        if self._job.agent is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._job.agent.wait(notice + ORPHANS_S)

    def _told_to_leave(self, signals: list[int]) -> bool:
        """Pass a first signal on to the agent; return whether to leave now."""
        for number in signals:
            if self._leaving and number == signal.SIGINT:
                return True
            if self._leaving:
                continue
            self._leaving = number
            if self._job.agent is not None:
                name = signal.Signals(number).name
                self._plan.say(f"got {name}; Ctrl-C makes this node leave at once")
                self._job.agent.send_signal(signal.SIGTERM)
        return bool(self._leaving) and self._job.agent is None

    def _end_agent(self, agents: _Agents) -> int:
        """Kill an agent and everything below it; return the agent's exit status."""
        agent, agents.agent = agents.agent, None
        if agent is None:
            return 0
        with agent:  # waits for its end, and closes its stdin
            agent.kill()
        others = {a.agent.pid for a in (self._job, self._checks) if a.agent is not None}
        asyncio.run(end_all(lambda: set(children()) - others, ORPHANS_S))
        sweep_scratch()
        return agent.returncode


def _why_lost(error: errors.RendezvousError) -> str:
    if isinstance(error, errors.UnauthorizedError):
        return "another run is served there now"
    if isinstance(error, (errors.SealedError, errors.RequestError)):
        return "the server has given this node up"
    return f"lost the server: {error}"


def check_spec(spec: JobSpec, plan: JoinPlan) -> None:
    """Raise UsageError if this host cannot run the job; tell the user if its command differs."""
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
        plan.say(f"the job runs the command of its server: {shlex.join(masked(spec.command))}")
