"""The agent of one host: joins the job, carries out orders, and ends when it should.

It is one asyncio loop; requests to the driver block threads beside it. `lifetime` knows the reasons
to end. Before it ends, it stops its workers and then the processes that they left behind.

When a driver dies, the agent waits for the next one for `driver_timeout` (`driver_link`). If none
comes, the workers get a notice, so that they leave at a step boundary and write a checkpoint. Times
are seconds.
"""

import asyncio
import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import msgspec

from elastic_driver import contract
from elastic_driver.contract import listening_ports, no_port_left, store_ports
from elastic_driver.errors import ClusterError, ExitCode
from elastic_driver.reachability import Presence, verified
from elastic_driver.runtime.library_logs import logs_shown
from elastic_driver.token_roles import own_token
from elastic_driver.words import orders as documents
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.wire_events import AgentReady, AgentReturned, ConnectionUnanswered
from launcher.agent.command_line import AgentConfig
from launcher.agent.driver_link import Consoles, DriverLink, RecordedOutput, term_in
from launcher.agent.environment import Meeting
from launcher.agent.folders import remove_orphans, scratch_folder
from launcher.agent.host import (
    CONNECTIONS_LOOK_S,
    Unanswered,
    UsageThread,
    first_free,
    free_ports,
    machine_id,
    usable_cpus,
    usable_memory,
)
from launcher.agent.lifetime import Heartbeats, Lifetime, ProbePort, Promise
from launcher.agent.processes import become_subreaper
from launcher.agent.warm.starter import WarmParent, WorkerStarter
from launcher.agent.warm.warm_plan import NotWarmable, warm_plan_for
from launcher.agent.worker_orders import Workers
from launcher.network import (
    address_of,
    interface_of,
    interfaces_with_addresses,
    meeting_point,
)
from rendezvous.auth import Credentials
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.wire import UNREADABLE, Entries, Get, expect

FIRST_CONTACT_S = 30.0  # the driver published the specification before it started us
STORE_PORTS = 16  # free ports to offer for torch's stores
SILENT_S = 5.0  # before the user hears that the driver does not answer
LAST_WORDS_S = 3.0  # for the last events and lines to get out


class Agent:
    """Carries out the driver's orders on this host until it ends; `run` is called once."""

    def __init__(
        self,
        config: AgentConfig,
        given: Credentials,
        inherited: WarmParent | None = None,
        stdin: int | None = None,
    ) -> None:
        token = own_token(given.token, config.host)
        known_by = given.fingerprint
        self._config = config
        self._token = token
        self._known_by = known_by
        self._stdin = stdin
        self._client = RendezvousClient(config.endpoint, token, fingerprint=known_by)
        marks = {contract.JOB_MARK: os.environ.get(contract.JOB_MARK, config.token_file)}
        self._starter = WorkerStarter(self._say, marks, inherited)
        presence = Presence(token, config.host, config.incarnation)
        self._probe_port = ProbePort(presence.answer, self._on_announced)
        self._life = Lifetime(config, self._say, self._probe_port.close)
        self._run_id, self._announced = "", 0  # the highest term that was announced
        self._heartbeats: Heartbeats | None = None
        self._usage: UsageThread | None = None
        self._consoles: Consoles | None = None
        self._recorded: RecordedOutput | None = None

    async def run(self) -> int:
        """Take part in the job until the agent has a reason to end; return the exit status."""
        become_subreaper()
        self._loop = asyncio.get_running_loop()
        self._life.listen()
        self._consoles = consoles = Consoles(self._say)
        try:
            with logs_shown(self._show_log), scratch_folder() as scratch:
                self._life.spawn(self._join(consoles, scratch))
                return await self._until_end(consoles)
        finally:
            self._probe_port.close()
            if self._usage is not None:
                self._usage.close()
            self._starter.close()
            self._client.abort()
            await consoles.close(LAST_WORDS_S)

    async def _until_end(self, consoles: Consoles) -> int:
        """Wait for a reason to end, and for the end of the workers; return the exit status."""
        life = self._life
        await life.until_over()
        if life.workers is not None:
            await life.workers.all_ended()
        if not life.driver_gone and life.link is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(life.link.delivered(), LAST_WORDS_S)
            await consoles.drain(LAST_WORDS_S)
            if self._recorded is not None:
                await self._recorded.drain(LAST_WORDS_S)
        await life.end_tasks()
        if life.workers is not None:
            await life.workers.end_strays()
        if life.exit_code != ExitCode.OK:
            self._say(f"{life.reason}; stopped our workers and ended")
        # An agent that has not joined the job yet cannot wait for the next driver; others do.
        if life.driver_gone and (life.waited_in_vain or not self._config.resumable):
            remove_orphans(self._config.orphan_files, self._is_of_our_driver)
        return life.exit_code

    def _is_of_our_driver(self, content: str) -> bool:
        """Return whether a file is of our driver, and not of another that is here meanwhile."""
        derived = own_token(content.partition("\n")[0], self._config.host)
        return derived == self._token or self._config.endpoint in content

    # ---- joining -------------------------------------------------------------------------

    async def _join(self, consoles: Consoles, scratch: str | None) -> None:
        """Read the job's specification, then take part in the job."""
        config = self._config
        try:
            spec, term = await self._first_contact()
        except (RendezvousError, *UNREADABLE) as error:
            self._life.end(f"cannot join the job: {error}", ExitCode.UNAVAILABLE, 0.0)
            return
        self._client.timeout = min(self._client.timeout, spec.heartbeat_timeout / 3)
        tokens = Path(config.token_file).parent if scratch is None else Path(scratch)
        try:
            address, interface = self._meeting_point(spec)
            self._meeting = Meeting(config.host, config.endpoint, tokens, interface, scratch)
            self._ready = await self._describe(spec, address)
        except ClusterError as error:
            self._life.end(str(error), ExitCode.USAGE, 0.0)
            return
        self._run_id, self._life.notice = spec.run_id, spec.grace_period
        link = self._life.link = self._link_to_driver(spec, term, consoles)
        workers = self._life.workers = self._make_workers(spec, link, consoles)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.strays)
        self._warm_up(spec)
        link.report(self._ready)
        self._life.spawn(link.obey(partial(self._carry_out, workers)))
        self._life.spawn(link.deliver())
        self._send_heartbeats(spec, workers)
        self._life.spawn(self._watch_connections(link, workers))

    async def _first_contact(self) -> tuple[JobSpec, int]:
        """Return what `_read_spec` does; say so where no answer comes for a while."""
        reading = asyncio.ensure_future(asyncio.to_thread(self._read_spec))
        if not (await asyncio.wait({reading}, timeout=SILENT_S))[0]:
            self._say(
                f"no answer from the rendezvous at {self._config.endpoint} for {SILENT_S:g} s: "
                "does a firewall drop connections from this host to that port? "
                "(docs/firewalls.md); still trying"
            )
        return await reading

    def _read_spec(self) -> tuple[JobSpec, int]:
        """Return the job's specification, and the term of the driver that has written it."""
        key = contract.spec_key(self._config.incarnation)
        asked = Get((key,), wait=FIRST_CONTACT_S), Get((contract.JOB_DRIVER,))
        answer = [expect(result, Entries) for result in self._client.batch(*asked)]
        if key not in answer[0].entries:
            raise RendezvousError(f"no {key} within {FIRST_CONTACT_S:.0f} s")
        spec = documents.decode(JobSpec, answer[0].entries[key].value)
        return spec, term_in(answer[1], documents.Reader(self._say))

    async def _describe(self, spec: JobSpec, address: str) -> AgentReady:
        """Open the port for probes; return what the driver has to know of this agent."""
        stores, slots, probe = await self._find_ports(spec, address)
        return AgentReady(
            self._config.host,
            self._config.incarnation,
            os.getpid(),
            address,
            stores,
            slot_ports=slots,
            probe_port=probe,
            cpus=usable_cpus(),
            memory=usable_memory(),
            machine_id=machine_id(self._config.host),
        )

    async def _find_ports(
        self, spec: JobSpec, address: str
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return free ports for stores and for the workers' servers; open the port for probes.

        Raises ClusterError where --ports leaves none for one of them.
        """
        if spec.ports is None:
            free = free_ports(STORE_PORTS + spec.slot_ports)
            probe = await self._probe_port.listen(address)
            return free[:STORE_PORTS], free[STORE_PORTS:], probe
        probe = await self._probe_port.listen(address, listening_ports(spec.ports))
        stores = first_free(store_ports(spec.ports), STORE_PORTS)
        slots = first_free(listening_ports(spec.ports), spec.slot_ports)
        found = (("probes", probe), ("torch's stores", stores))
        for purpose, ports in (*found, ("TensorFlow", slots or not spec.slot_ports)):
            if not ports:
                raise ClusterError(no_port_left(spec.ports, purpose, self._config.host))
        return stores, slots, probe

    async def _watch_connections(self, link: DriverLink, workers: Workers) -> None:
        """Report connections of workers that nobody answers."""
        unanswered = Unanswered()
        while True:
            await asyncio.sleep(CONNECTIONS_LOOK_S)
            if not (pids := workers.pids()):
                continue
            for found in await asyncio.to_thread(unanswered.look, pids):
                agent = self._config.host, self._config.incarnation
                link.report(ConnectionUnanswered(*agent, **found._asdict()))

    def _make_workers(self, spec: JobSpec, link: DriverLink, consoles: Consoles) -> Workers:
        """Return the workers, of which there are none yet; begin to record their output."""
        config, record = self._config, None
        if spec.keep_output and config.incarnation < contract.FIRST_OF_CHECKS:
            self._recorded = RecordedOutput(config.host, config.incarnation, link.post)
            self._life.spawn(self._recorded.run())
            record = self._recorded.take
        return Workers(
            spec,
            self._meeting,
            Credentials(self._token, self._known_by),
            self._starter,
            (consoles.stdout, consoles.stderr),
            report=link.report,
            say=self._say,
            record=record,
            stdin=self._stdin,
        )

    def _link_to_driver(self, spec: JobSpec, term: int, consoles: Consoles) -> DriverLink:
        link = DriverLink(
            self._client,
            (self._config.host, self._config.incarnation),
            spec,
            term,
            story=self._story,
            on_absent=consoles.divert,
            say=self._say,
        )
        if link.waits:
            agent = self._config.host, self._config.incarnation
            posted = consoles.outlive(agent, link.post, lambda: not link.absent)
            self._life.spawn(posted.run())
            self._life.spawn(link.watch())
        return link

    def _warm_up(self, spec: JobSpec) -> None:
        try:
            self._starter.launch(warm_plan_for(spec, os.environ))
        except NotWarmable as reason:
            self._starter.close()
            if spec.warm:  # the user wants it
                self._say(f"no warm workers: {reason}")

    def _send_heartbeats(self, spec: JobSpec, workers: Workers) -> None:
        if not spec.heartbeat_interval:
            return
        most = spec.heartbeat_timeout
        promise = Promise(min(spec.heartbeat_interval, most / 3), most)
        config = self._config
        key = contract.agent_heartbeat(config.host, config.incarnation)
        waits = spec.driver_timeout > 0
        self._heartbeats = Heartbeats(self._client, key, promise, waits=waits)
        self._heartbeats.usage_key = contract.agent_usage(config.host, config.incarnation)
        self._usage = UsageThread(workers.pids)
        self._heartbeats.usage = self._usage.take
        self._usage.start()
        self._life.spawn(self._heartbeats.run())

    def _meeting_point(self, spec: JobSpec) -> tuple[str, str | None]:
        """Return the address and the interface where workers of other hosts reach ours.

        Raises ClusterError where the host has none of the interfaces that the user names.
        """
        config = self._config
        if config.address is not None:
            return config.address, interface_of(config.address)
        wanted = [name for name in spec.env.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if wanted and address_of(wanted) is None:
            raise ClusterError(
                f"{config.host} has no interface {' or '.join(wanted)} with an address "
                "(--network-interfaces, GLOO_SOCKET_IFNAME); it has "
                f"{', '.join(sorted(interfaces_with_addresses()))}"
            )
        address, interface = meeting_point(config.endpoint, wanted)
        return address or config.host, interface

    # ---- the driver --------------------------------------------------------------------

    def _carry_out(self, workers: Workers, order: documents.Order) -> None:
        match order:
            case documents.StartWorkerOrder():
                if not self._life.is_over:
                    workers.start(order)
            case documents.StopWorkerOrder(worker=worker, grace=grace):
                workers.stop(worker, grace)
            case documents.RanksOrder():
                workers.rank(order)
                if self._heartbeats is not None:
                    self._heartbeats.peers = order.peers
            case documents.StacksOrder(number=number):
                workers.look(number)
            case _:
                self._life.end(order.reason, ExitCode.OK, order.grace, interrupt=order.interrupt)

    def _story(self, term: int) -> AgentReturned:
        """Return what the driver of this term has to know."""
        workers = self._life.workers.story() if self._life.workers is not None else ()
        return AgentReturned(**msgspec.structs.asdict(self._ready), term=term, workers=workers)

    def _on_announced(self, line: bytes) -> None:
        """Follow a driver that has taken over at another address."""
        link = self._life.link
        driver = verified(line, self._run_id, self._token)
        if link is None or driver is None or driver.term <= max(link.term, self._announced):
            return
        self._announced = driver.term
        try:
            self._client.move(driver.url)
        except ValueError:
            return
        own = self._config.driver_file
        for file in (self._meeting.driver_file, None if own is None else Path(own)):
            if file is not None:
                with contextlib.suppress(OSError):  # its readers do not find the driver then
                    draft = file.with_suffix(".new")
                    draft.write_text(driver.url, encoding="ascii")
                    draft.replace(file)
        if self._life.workers is not None:
            self._life.workers.driver_moved(driver.url)

    def _show_log(self, line: str, _by_library: bool) -> None:
        """Show a line of a log; any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._say, line)

    def _say(self, sentence: str) -> None:
        if self._consoles is not None:
            line = f"elasticrun: agent on {self._config.host}: {sentence}\n"
            self._consoles.stderr.write(line.encode(errors="replace"))
