"""A rendezvous and one agent on each host, for as long as a node check lasts.

`nodes` owns one: it opens it, gives orders, reads what agents and tasks say, and closes it.
Agents are those of a job, started in the same way; only their work differs. All methods belong to
one thread; server and starter put what they notice into the mailbox. Times are seconds.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec
from aiohttp import web

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec, Order, ShutdownOrder, encode
from elastic_driver.core.events import AgentLost, AgentReady, WireEvent
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck.messages import (
    TASK_SETTINGS,
    Assignment,
    TaskEnded,
    TaskSettings,
    assignment_key,
)
from elastic_driver.runtime.api import EventAccepted
from elastic_driver.runtime.backend import Backend, MakeBackend
from elastic_driver.runtime.run_dir import RunDir
from rendezvous.auth import make_token, write_token_file
from rendezvous.errors import RendezvousError
from rendezvous.server import RendezvousServer
from rendezvous.web import JSON, Problem, read_json
from rendezvous.wire import EVENTS_PATH, DeletePrefix, Entries, Get, Set

INCARNATION = 1  # an agent that is lost is not started again: its node has failed the check
MAX_MAIL = 100_000
SHUTDOWN_S = 5.0  # for agents to end by themselves

News = WireEvent | TaskEnded  # what agents and tasks say

_decode_event: Callable[[bytes], News] = msgspec.json.Decoder(News).decode


class _Cancelled:
    """In the mailbox: nobody wants to know any more."""


class CheckFleet:
    """Agents on `hosts`, and the means to speak with them; a context manager.

    Args:
        hosts: their names.
        spec: what a task's process runs.
        settings: what the tasks read.
        starter: makes the object that starts agents.
        run_dir: a folder for token and endpoint; created and cleaned up here.
        bind: numeric address and port the rendezvous listens on.
        status: the document `/v1/status` shows; called on the server's thread.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[str],
        spec: JobSpec,
        settings: TaskSettings,
        starter: MakeBackend,
        run_dir: RunDir,
        bind: tuple[str, int],
        status: Callable[[], bytes],
    ) -> None:
        self._hosts, self._spec, self._settings = tuple(hosts), spec, settings
        self._make_starter, self._run_dir, self._bind = starter, run_dir, bind
        self._status = status
        self._mailbox: queue.SimpleQueue[News | AgentLost | _Cancelled] = queue.SimpleQueue()
        self._server: RendezvousServer | None = None
        self._starter: Backend | None = None
        self._orders: dict[str, int] = {}  # host → orders given; only agents that live
        self.agents: dict[str, AgentReady] = {}  # those that are up

    def __enter__(self) -> CheckFleet:
        """Open the rendezvous and begin to start the agents; raises ElasticError."""
        self._run_dir.create()
        try:
            token = make_token()
            write_token_file(self._run_dir.token_file, token)
            self._server = RendezvousServer(
                *self._bind,
                token=token,
                on_lease_expired=self._lease_expired,
                routes=self._add_routes,
            ).start()
            self._server.apply(
                [
                    Set(contract.JOB_SPEC, encode(self._spec)),
                    Set(TASK_SETTINGS, encode(self._settings)),
                ]
            )
            self._run_dir.write_endpoint(self._server.url, time.time())
            self._starter = self._make_starter(self._server.url, self._run_dir.token_file)
            for host in self._hosts:
                self._start_agent(host)
        except RendezvousError as error:
            self._close()
            raise ClusterError(f"the node check cannot start: {error}") from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the agents and everything they run; with an error under way at once."""
        if error is None:
            for host in list(self._orders):
                self.order(host, ShutdownOrder(0.0, "the node check is over"))
        self._close(SHUTDOWN_S if error is None else 0.0)

    # ---- speaking ------------------------------------------------------------------------

    def order(self, host: str, order: Order) -> None:
        """Give an order to a host's agent; one that is lost gets none."""
        if host not in self._orders:
            return
        self._orders[host] += 1
        key = contract.agent_order(host, INCARNATION, self._orders[host])
        self._running().post([Set(key, encode(order))])

    def hear(self, until: float) -> News | AgentLost | None:
        """The next thing that happened; None once the monotonic time `until` has come.

        Raises ClusterError after `cancel`.
        """
        try:
            event = self._mailbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(event, _Cancelled):
            raise ClusterError("the node check was cancelled")
        if isinstance(event, AgentReady) and event.host in self._orders:
            self.agents[event.host] = event
        elif isinstance(event, AgentLost):
            self.agents.pop(event.host, None)
            self._orders.pop(event.host, None)
        return event

    def cancel(self) -> None:
        """Have whoever hears, or will hear, give up; may be called by any thread."""
        self._mailbox.put(_Cancelled())

    def read(self, key: str) -> bytes | None:
        """What stands under a key of the store."""
        (found,) = self._running().apply([Get((key,))])
        entry = found.entries.get(key) if isinstance(found, Entries) else None
        return None if entry is None else entry.value

    def assign(self, worker: str, number: int, assignment: Assignment) -> None:
        """Give a process that has done `number` tasks its next one."""
        self._running().post([Set(assignment_key(worker, number), encode(assignment))])

    def publish(self, key: str) -> None:
        """Write a key whose being there is the message."""
        self._running().post([Set(key, b"")])

    def forget(self, prefix: str) -> None:
        """Delete and seal every key below a prefix."""
        self._running().post([DeletePrefix(prefix, seal=True)])

    def give_up(self, host: str) -> None:
        """End an agent that does not do as it is told; it gets no further orders."""
        self.agents.pop(host, None)
        self._orders.pop(host, None)
        if self._starter is not None:
            self._starter.kill(host, INCARNATION)

    # ---- parts ---------------------------------------------------------------------------

    def _start_agent(self, host: str) -> None:
        if self._starter is None:
            raise RuntimeError("a fleet is opened before agents are started")
        self._orders[host] = 0

        def on_lost(reason: str) -> None:
            self._mailbox.put(AgentLost(host, INCARNATION, reason))

        self._starter.start(host, INCARNATION, on_lost)

    def _running(self) -> RendezvousServer:
        if self._server is None:
            raise RuntimeError("a fleet is opened before it is spoken to")
        return self._server

    def _lease_expired(self, key: str) -> None:
        agent = contract.agent_of_lease(key)
        if agent is not None:
            silent = f"its agent was silent for {self._spec.heartbeat_timeout:g} s"
            self._mailbox.put(AgentLost(*agent, reason=silent))

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_post(EVENTS_PATH, self._post_event)
        app.router.add_get(contract.STATUS_PATH, self._get_status, allow_head=False)

    async def _post_event(self, request: web.Request) -> web.Response:
        event = await read_json(request, _decode_event)
        if self._mailbox.qsize() >= MAX_MAIL:
            raise Problem(503, "not_accepting", "the check has too much to do", "try again later")
        self._mailbox.put(event)
        return web.Response(
            body=msgspec.json.encode(EventAccepted()), status=202, content_type=JSON
        )

    async def _get_status(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._status(), content_type=JSON)

    def _close(self, grace: float = 0.0) -> None:
        if self._starter is not None:
            self._starter.close(grace)
        if self._server is not None:
            self._server.stop()
        self._run_dir.close()
