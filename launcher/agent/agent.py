"""The agent of one host: reads its orders, keeps its lease, and ends when it should.

One asyncio loop; requests to the driver block threads beside it. It ends for one of these
reasons, and each way it first stops its workers and then whatever they left behind: the driver
orders it, a signal asks for it, or the driver is gone (its pipe closed, no answer within the
heartbeat timeout, a token that is not known any more, keys that were sealed). A signal that
announces the host's end (`host.leaving`) first lets the driver take the workers away in good
order.
"""

from __future__ import annotations

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
from elastic_driver.core.documents import (
    JobSpec,
    Order,
    RanksOrder,
    StacksOrder,
    StartWorkerOrder,
    StopWorkerOrder,
    decode,
    decode_order,
)
from elastic_driver.core.events import AgentReady
from elastic_driver.errors import ExitCode
from launcher.agent.console import Console
from launcher.agent.environment import Meeting
from launcher.agent.folders import clear_unheld, scratch_folder
from launcher.agent.outbox import Outbox
from launcher.agent.ports import free_ports
from launcher.agent.preemption import ANNOUNCING, Leaving
from launcher.agent.processes import become_subreaper
from launcher.agent.warm.command import NotWarmable
from launcher.agent.warm.fork_client import Inherited
from launcher.agent.warm.plan import plan_for
from launcher.agent.warm.starter import WarmStarter
from launcher.agent.workers import Workers
from launcher.network import interface_of, meeting_point
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.wire import MAX_WAIT_S, Entries, Get, Set, StoreRefusal, Watch

FIRST_CONTACT_S = 30.0  # the driver published the specification before it started us
ORPHAN_GRACE_S = 5.0  # for workers whose driver is gone, or whose agent got a signal
ORDERS_AHEAD = 16  # orders one answer may bring
STORE_PORTS = 16  # free ports to offer for torch's stores
LAST_WORDS_S = 3.0


class AgentConfig(Struct, frozen=True, kw_only=True):
    """What an agent is told when it is started."""

    endpoint: str  # http://host:port
    host: str
    incarnation: int
    token_file: str
    address: str | None = None  # where other hosts reach this one; None: the way to the driver
    lifeline: bool = False  # our stdin is a pipe that closes when the driver dies
    orphan_files: tuple[str, ...] = ()  # to be removed when it does


class Ending(Struct, frozen=True):
    """Why and how the agent ends."""

    reason: str
    exit_code: int
    grace: float
    driver_gone: bool = False


class Agent:
    """Carries out the driver's orders on this host until it ends; `run` once."""

    def __init__(self, config: AgentConfig, token: str, inherited: Inherited | None = None) -> None:
        self._config, self._token = config, token
        self._starter = WarmStarter(self._say, inherited=inherited)
        self._endings: asyncio.Queue[Ending] = asyncio.Queue()
        self._signals = 0
        self._leaving: Leaving | None = None  # once there is somebody to tell
        self._shutting_down = False
        self._workers: Workers | None = None
        self._err: Console | None = None
        self._scratch: str | None = None

    async def run(self) -> int:
        """The agent's whole life; returns its exit status."""
        become_subreaper()
        self._listen()
        consoles = (
            Console(1, "stdout", on_trouble=self._say),
            Console(2, "stderr", on_trouble=lambda _sentence: None),
        )
        self._err = consoles[1]
        client = RendezvousClient(self._config.endpoint, self._token)
        try:
            with scratch_folder() as self._scratch:
                ending = await self._live(client, consoles)
        finally:
            self._starter.close()
            client.abort()
            for console in consoles:
                await console.drain(LAST_WORDS_S)
                console.close()
        return ending.exit_code

    # ---- what can end it -----------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        for number in (signal.SIGINT, signal.SIGHUP, *ANNOUNCING):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._config.lifeline:
            loop.add_reader(0, self._on_lifeline)

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave in good order if that is what it means, else end; a second end is at once."""
        if self._leaving is not None and not self._shutting_down and self._leaving.takes(number):
            return
        self._signals += 1
        grace = ORPHAN_GRACE_S if self._signals == 1 else 0.0
        self._end(f"got {number.name}", 128 + number, grace)

    def _on_lifeline(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                asyncio.get_running_loop().remove_reader(0)
                self._lose_driver("its pipe to us has closed")

    def _on_child(self) -> None:
        if self._workers is not None:
            self._workers.reap_strays()

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            traceback.print_exception(error)
        self._end(f"a bug of ours: {context.get('message')}", ExitCode.BUG, 0.0)

    def _lose_driver(self, why: str) -> None:
        reason = f"the driver is gone: {why}"
        self._end(reason, ExitCode.UNAVAILABLE, ORPHAN_GRACE_S, driver_gone=True)

    def _end(self, reason: str, exit_code: int, grace: float, *, driver_gone: bool = False) -> None:
        self._endings.put_nowait(Ending(reason, int(exit_code), grace, driver_gone))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one of the endless loops; its end is the agent's end."""
        try:
            await work
        except RendezvousError as error:
            self._lose_driver(str(error))
        except Exception as error:
            traceback.print_exception(error)
            self._end(f"a bug of ours: {error!r}", ExitCode.BUG, 0.0)

    # ---- its life ------------------------------------------------------------------------

    async def _live(self, client: RendezvousClient, consoles: tuple[Console, Console]) -> Ending:
        spec = await self._first_contact(client)
        if isinstance(spec, Ending):
            return self._leave(spec)
        client.timeout = min(client.timeout, spec.heartbeat_timeout / 3)
        outbox = Outbox(client, spec.heartbeat_timeout, self._say)
        address, interface = self._meeting_point(spec)
        meeting = Meeting(
            self._config.host,
            self._config.endpoint,
            self._config.token_file,
            interface,
            self._scratch,
        )
        workers = Workers(
            spec=spec,
            meeting=meeting,
            starter=self._starter,
            consoles=consoles,
            report=outbox.put,
            say=self._say,
        )
        self._workers = workers
        self._leaving = self._leaving_of(spec, outbox)
        self._warm_up(spec)
        outbox.put(self._introduction(address, spec.slot_ports))
        loops = [
            asyncio.create_task(self._guarded(self._obey(client, spec, workers))),
            asyncio.create_task(self._guarded(outbox.deliver())),
        ]
        ending = await self._endings.get()
        self._shutting_down = True
        if self._leaving is not None:
            self._leaving.over()
        ending = await self._stop_workers(workers, ending)
        if not ending.driver_gone:
            await outbox.emptied(LAST_WORDS_S)
        for task in loops:
            task.cancel()
        await asyncio.wait(loops)
        await workers.end_strays()
        return self._leave(ending)

    def _leaving_of(self, spec: JobSpec, outbox: Outbox) -> Leaving | None:
        if not spec.leave_notice:
            return None
        return Leaving(
            self._config.host,
            self._config.incarnation,
            spec.leave_notice,
            tell=outbox.put,
            end=lambda number, reason, grace: self._end(reason, 128 + number, grace),
            say=self._say,
        )

    async def _first_contact(self, client: RendezvousClient) -> JobSpec | Ending:
        """The job's specification, or what came before it."""

        async def read() -> JobSpec:
            entry = await asyncio.to_thread(client.get, contract.JOB_SPEC, FIRST_CONTACT_S)
            if entry is None:
                raise RendezvousError(f"no {contract.JOB_SPEC} within {FIRST_CONTACT_S:.0f} s")
            return decode(JobSpec, entry.value)

        reading = asyncio.create_task(read())
        leaving = asyncio.create_task(self._endings.get())
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            reading.cancel()
            await asyncio.wait((reading,))
            return leaving.result()
        leaving.cancel()
        try:
            return reading.result()
        except (RendezvousError, msgspec.DecodeError) as error:
            return Ending(f"cannot join the job: {error}", ExitCode.UNAVAILABLE, 0.0)

    def _warm_up(self, spec: JobSpec) -> None:
        """Begin to import what the workers will; harmless where that cannot be done."""
        try:
            self._starter.launch(plan_for(spec, os.environ))
        except NotWarmable as reason:
            self._starter.disinherit()
            if spec.warm:  # somebody asked for it
                self._say(f"no warm workers: {reason}")

    async def _stop_workers(self, workers: Workers, ending: Ending) -> Ending:
        """Stop all workers and wait for their end; a further reason may shorten their grace."""
        ended = asyncio.create_task(workers.all_ended())
        workers.stop_all(ending.grace)
        while not ended.done():
            another = asyncio.create_task(self._endings.get())
            await asyncio.wait((ended, another), return_when=asyncio.FIRST_COMPLETED)
            if another.done():
                workers.stop_all(another.result().grace)
                if another.result().driver_gone:
                    ending = another.result()
            else:
                another.cancel()
        return ending

    def _leave(self, ending: Ending) -> Ending:
        """Say why we end, unless we were told to, and clean up for a driver that cannot."""
        if ending.exit_code != ExitCode.OK:
            self._say(f"{ending.reason}; stopped our workers and ended")
        if ending.driver_gone:
            remove_orphan_files(self._config, self._token)
        return ending

    def _meeting_point(self, spec: JobSpec) -> tuple[str, str | None]:
        """The address and the interface at which workers of other hosts reach ours."""
        config = self._config
        if config.address is not None:
            return config.address, interface_of(config.address)
        wanted = spec.env.get("GLOO_SOCKET_IFNAME", "").split(",")
        address, interface = meeting_point(config.endpoint, wanted)
        return address or config.host, interface

    def _introduction(self, address: str, slot_ports: int) -> AgentReady:
        config = self._config
        ports = free_ports(STORE_PORTS + slot_ports)
        return AgentReady(
            host=config.host,
            incarnation=config.incarnation,
            pid=os.getpid(),
            address=address,
            ports=ports[:STORE_PORTS],
            slot_ports=ports[STORE_PORTS:],
        )

    # ---- orders --------------------------------------------------------------------------

    async def _obey(self, client: RendezvousClient, spec: JobSpec, workers: Workers) -> None:
        """Renew the lease and wait for orders, in one request; carry them out one by one."""
        config, patience = self._config, spec.heartbeat_timeout
        lease = Set(contract.agent_lease(config.host, config.incarnation), lease=patience)
        done = 0
        while True:
            keys = tuple(
                contract.agent_order(config.host, config.incarnation, done + n)
                for n in range(1, ORDERS_AHEAD + 1)
            )
            watch = Watch({keys[0]: 0}, wait=min(patience / 3, MAX_WAIT_S))
            answer = await asyncio.to_thread(
                client.batch, lease, watch, Get(keys), deadline=patience
            )
            for result in answer:
                if isinstance(result, StoreRefusal):
                    raise RendezvousError(f"it has given this agent up ({result.message})")
            found = answer[-1].entries if isinstance(answer[-1], Entries) else {}
            for key in keys:
                if key not in found:
                    break
                self._carry_out(decode_order(found[key].value), workers)
                done += 1

    def _carry_out(self, order: Order, workers: Workers) -> None:
        if isinstance(order, StartWorkerOrder):
            if not self._shutting_down:
                workers.start(order)
        elif isinstance(order, StopWorkerOrder):
            workers.stop(order.worker, order.grace)
        elif isinstance(order, RanksOrder):
            workers.rank(order)
        elif isinstance(order, StacksOrder):
            workers.look(order.number)
        else:
            self._shutting_down = True
            self._end(order.reason, ExitCode.OK, order.grace)

    def _say(self, sentence: str) -> None:
        if self._err is not None:
            line = f"elasticrun: agent on {self._config.host}: {sentence}\n"
            self._err.write(line.encode(errors="replace"))


def remove_orphan_files(config: AgentConfig, token: str) -> None:
    """Remove the files of a driver that died, and only of that one.

    A driver started again under the same name may have written its own meanwhile; ours are
    known by the token or the address in them.
    """
    for name in config.orphan_files:
        path = Path(name)
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if token.encode() in content or config.endpoint.encode() in content:
                path.unlink()
                clear_unheld(path.parent)  # it was made for this alone
