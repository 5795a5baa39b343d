"""The agent of one host: reads its orders, keeps its lease, and ends when it should.

It is one asyncio loop; requests to the driver block threads beside it. It ends when the driver
orders it, when a signal asks for it, or when the driver is gone (its pipe has closed, no answer
came within the heartbeat timeout, the token is unknown, the keys are sealed). Before it ends, it
stops its workers and then the processes that they left behind.

Batch systems and clouds send SIGTERM before they take a machine away, Slurm also what `--signal`
names. The agent reports the first of these signals to the driver, which has the workers leave at a
step boundary and then orders the agent to end. Shortly before the time is over, the agent stops the
workers that are still here. Times are seconds.
"""

import asyncio
import contextlib
import os
import signal
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.console import Console
from elastic_driver.core import documents
from elastic_driver.core.events import AgentReady, HostLeaving, WireEvent
from elastic_driver.errors import ExitCode
from launcher.agent.environment import Meeting
from launcher.agent.folders import clear_unheld, scratch_folder
from launcher.agent.liveness import CutOffError, Heartbeats, Promise, answer_probes
from launcher.agent.ports import free_ports
from launcher.agent.processes import NOTICES, become_subreaper
from launcher.agent.warm.command import NotWarmable
from launcher.agent.warm.plan import plan_for
from launcher.agent.warm.starter import WarmParent, WorkerStarter
from launcher.agent.workers import Workers
from launcher.network import interface_of, meeting_point
from rendezvous.client import RendezvousClient
from rendezvous.errors import RefusedError, RendezvousError, RequestError
from rendezvous.wire import EVENTS_PATH, MAX_WAIT_S, Entries, Get, Set, Watch, Written, expect

FIRST_CONTACT_S = 30.0  # the driver published the specification before it started us
ORPHAN_GRACE_S = 5.0  # for workers whose driver is gone, or whose agent got a signal
ORDERS_AHEAD = 16  # orders that one answer may bring
STORE_PORTS = 16  # free ports to offer for torch's stores
LAST_WORDS_S = 3.0  # for the last events and lines to get out
ANNOUNCING = (signal.SIGTERM, *NOTICES)


class AgentConfig(Struct, frozen=True, kw_only=True):
    """The agent's command line."""

    endpoint: str  # http://host:port of the driver
    host: str  # this host's name, as discovery has it
    incarnation: int  # counts the agents of this host
    token_file: str  # path of the job's token
    address: str | None = None  # at which other hosts reach this one; None: that towards the driver
    lifeline: bool = False  # our stdin is a pipe that closes when the driver dies
    orphan_files: list[str] = []  # files of the driver, to be removed if it dies


class Agent:
    """Carries out the driver's orders on this host until it ends; `run` is called once."""

    def __init__(
        self, config: AgentConfig, token: str, inherited: WarmParent | None = None
    ) -> None:
        self._config, self._token = config, token
        self._client = RendezvousClient(config.endpoint, token)
        marks = {contract.TOKEN_FILE: config.token_file}
        self._starter = WorkerStarter(self._say, marks, inherited)
        self._events: asyncio.Queue[WireEvent] = asyncio.Queue()  # for the driver, in order
        self._report = self._events.put_nowait
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()  # set with a reason, an exit status, and the driver's state
        self._reason, self._exit_code, self._driver_gone = "", 0, False
        self._signals = 0
        self._notice = 0.0  # seconds to leave in good order; 0: a signal ends this agent at once
        self._leave_timer: asyncio.TimerHandle | None = None  # runs after `_announce`
        self._workers: Workers | None = None
        self._listener: asyncio.Server | None = None  # answers probes
        self._err: Console | None = None

    async def run(self) -> int:
        """Take part in the job until the agent has a reason to end; return the exit status."""
        become_subreaper()
        self._listen()
        self._err = Console(2, "stderr", on_trouble=lambda _sentence: None)
        consoles = (Console(1, "stdout", on_trouble=self._say), self._err)
        try:
            with scratch_folder() as scratch:
                self._spawn(self._join(consoles, scratch))
                return await self._until_end()
        finally:
            if self._listener is not None:
                self._listener.close()
            self._starter.close()
            self._client.abort()
            for console in consoles:
                await console.drain(LAST_WORDS_S)
                console.close()

    async def _until_end(self) -> int:
        """Wait for a reason to end, and for the end of the workers; return the exit status."""
        await self._ended.wait()
        if self._leave_timer is not None:
            self._leave_timer.cancel()
        if self._workers is not None:
            await self._workers.all_ended()
        if not self._driver_gone:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._events.join(), LAST_WORDS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        if self._workers is not None:
            await self._workers.end_strays()
        if self._exit_code != ExitCode.OK:
            self._say(f"{self._reason}; stopped our workers and ended")
        if self._driver_gone:
            remove_orphan_files(self._config, self._token)
        return self._exit_code

    # ---- reasons to end ------------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        for number in (signal.SIGINT, signal.SIGHUP, *ANNOUNCING):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._config.lifeline:
            loop.add_reader(0, self._on_lifeline)

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave in good order if the signal announces the end of the host; otherwise end.

        A second signal to end kills the workers at once.
        """
        if self._notice and not self._ended.is_set() and number in ANNOUNCING:
            if self._leave_timer is None:
                self._announce(number)
                return
            if number != signal.SIGTERM:  # a SIGTERM after the announcement ends us
                return
        self._signals += 1
        grace = ORPHAN_GRACE_S if self._signals == 1 else 0.0
        self._end(f"got {number.name}", 128 + number, grace)

    def _announce(self, number: signal.Signals) -> None:
        """Report that this host goes away, and end in time even if the driver does nothing."""
        notice, patience = self._notice, documents.time_to_leave(self._notice)
        reason = f"its agent got {number.name}"
        self._report(HostLeaving(self._config.host, self._config.incarnation, notice, reason))
        self._say(f"got {number.name}: leaving this host within {notice:g} s")
        late = f"got {number.name}, and workers were still here {patience:g} s later"
        loop = asyncio.get_running_loop()
        self._leave_timer = loop.call_later(
            patience, self._end, late, 128 + number, notice - patience
        )

    def _on_lifeline(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                asyncio.get_running_loop().remove_reader(0)
                self._lose_driver("its pipe to us has closed")

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            traceback.print_exception(error)
        self._end(f"a bug of ours: {context.get('message')}", ExitCode.BUG, 0.0)

    def _lose_driver(self, why: str, grace: float = ORPHAN_GRACE_S) -> None:
        reason = f"the driver is gone: {why}"
        self._end(reason, ExitCode.UNAVAILABLE, grace, driver_gone=True)

    def _end(self, reason: str, exit_code: int, grace: float, *, driver_gone: bool = False) -> None:
        """Begin to end: kill workers that are still here in `grace` seconds.

        If it is called again, the shorter time counts, and the first reason unless the driver is
        gone.
        """
        if driver_gone or not self._ended.is_set():
            self._reason, self._exit_code, self._driver_gone = reason, int(exit_code), driver_gone
        self._ended.set()
        if self._workers is not None:
            self._workers.stop_all(grace)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the agent; its failure is the agent's end."""
        try:
            await work
        except CutOffError as error:  # the others train on without our workers
            self._lose_driver(str(error), grace=0.0)
        except RendezvousError as error:
            self._lose_driver(str(error))
        except Exception as error:
            traceback.print_exception(error)
            self._end(f"a bug of ours: {error!r}", ExitCode.BUG, 0.0)

    # ---- its life ------------------------------------------------------------------------

    async def _join(self, consoles: tuple[Console, Console], scratch: str | None) -> None:
        """Read the job's specification, then take part in the job."""
        config, key = self._config, contract.spec_key(self._config.incarnation)
        try:
            entry = await asyncio.to_thread(self._client.get, key, FIRST_CONTACT_S)
            if entry is None:
                raise RendezvousError(f"no {key} within {FIRST_CONTACT_S:.0f} s")
            spec = documents.decode(documents.JobSpec, entry.value)
        except (RendezvousError, msgspec.DecodeError) as error:
            self._end(f"cannot join the job: {error}", ExitCode.UNAVAILABLE, 0.0)
            return
        self._client.timeout = min(self._client.timeout, spec.heartbeat_timeout / 3)
        address, interface = self._meeting_point(spec)
        meeting = Meeting(config.host, config.endpoint, config.token_file, interface, scratch)
        workers = self._workers = Workers(
            spec, meeting, self._starter, consoles, report=self._report, say=self._say
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.strays)
        self._notice = spec.grace_period
        try:
            self._starter.launch(plan_for(spec, os.environ))
        except NotWarmable as reason:
            self._starter.close()
            if spec.warm:  # the user wants it
                self._say(f"no warm workers: {reason}")
        ports = free_ports(STORE_PORTS + spec.slot_ports)
        stores, rest = ports[:STORE_PORTS], ports[STORE_PORTS:]
        agent = config.host, config.incarnation
        self._listener, port = await answer_probes(address)
        ready = AgentReady(*agent, os.getpid(), address, stores, slot_ports=rest, probe_port=port)
        self._report(ready)
        self._spawn(self._obey(spec.heartbeat_timeout, workers))
        self._spawn(self._deliver(spec.heartbeat_timeout))
        if spec.heartbeat_interval:
            most = spec.heartbeat_timeout
            promise = Promise(min(spec.heartbeat_interval, most / 3), most)
            key = contract.agent_heartbeat(*agent)
            self._spawn(Heartbeats(self._client.clone(), key, promise).run())

    def _meeting_point(self, spec: documents.JobSpec) -> tuple[str, str | None]:
        """Return the address and the interface where workers of other hosts reach ours."""
        config = self._config
        if config.address is not None:
            return config.address, interface_of(config.address)
        wanted = spec.env.get("GLOO_SOCKET_IFNAME", "").split(",")
        address, interface = meeting_point(config.endpoint, wanted)
        return address or config.host, interface

    # ---- reports -------------------------------------------------------------------------

    async def _deliver(self, patience: float) -> None:
        """Deliver events for ever, one at a time; raises RendezvousError if the driver is gone.

        An event that the driver refuses is a bug of ours: it is shown and dropped, so that it does
        not hold up the events behind it.
        """
        while True:
            event = await self._events.get()
            try:
                body = msgspec.json.encode(event)
                await asyncio.to_thread(self._client.post_json, EVENTS_PATH, body, patience)
            except RequestError as error:
                self._say(f"the driver did not take {type(event).__name__}: {error}")
            finally:
                self._events.task_done()

    # ---- orders --------------------------------------------------------------------------

    async def _obey(self, patience: float, workers: Workers) -> None:
        """Renew the lease and wait for orders, in one request; carry them out one by one."""
        agent = self._config.host, self._config.incarnation
        lease = Set(contract.agent_lease(*agent), lease=patience)
        done = 0
        while True:
            keys = tuple(contract.agent_order(*agent, done + n + 1) for n in range(ORDERS_AHEAD))
            watch = Watch({keys[0]: 0}, wait=min(patience / 3, MAX_WAIT_S))
            answer = await asyncio.to_thread(
                self._client.batch, lease, watch, Get(keys), deadline=patience
            )
            try:
                expect(answer[0], Written)
                expect(answer[1], Entries)
                found = expect(answer[2], Entries).entries
            except RefusedError as error:
                raise RendezvousError(f"it has given this agent up ({error})") from error
            for key in keys:
                if key not in found:
                    break
                self._carry_out(documents.decode_order(found[key].value), workers)
                done += 1

    def _carry_out(self, order: documents.Order, workers: Workers) -> None:
        match order:
            case documents.StartWorkerOrder():
                if not self._ended.is_set():
                    workers.start(order)
            case documents.StopWorkerOrder(worker=worker, grace=grace):
                workers.stop(worker, grace)
            case documents.RanksOrder():
                workers.rank(order)
            case documents.StacksOrder(number=number):
                workers.look(number)
            case _:
                self._end(order.reason, ExitCode.OK, order.grace)

    def _say(self, sentence: str) -> None:
        if self._err is not None:
            line = f"elasticrun: agent on {self._config.host}: {sentence}\n"
            self._err.write(line.encode(errors="replace"))


def remove_orphan_files(config: AgentConfig, token: str) -> None:
    """Remove the files of our driver, which has died.

    Another driver may have written files at the same paths meanwhile; those of our driver hold its
    token or its address.
    """
    for name in config.orphan_files:
        path = Path(name)
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if token.encode() in content or config.endpoint.encode() in content:
                path.unlink()
                clear_unheld(path.parent)  # it was made for this alone
