"""One node that joins a job: waits for its server, runs the agents it is told to, and leaves.

The node is the parent of its agents, by way of the local backend, so what holds on the driver's
own machine holds here: nothing outlives this process. Workers' lines appear on this terminal.
It ends with the job's exit status; a first signal has its workers leave at a step boundary, a
second one ends them at once. When the server is gone, agents end by themselves within the
heartbeat timeout, and the node waits for the server to come back.

One asyncio loop; the local backend's thread tells it of agents' ends. Times are seconds.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.core.documents import JobSpec
from elastic_driver.core.join_messages import JoinRequest
from elastic_driver.errors import UsageError
from launcher.agent.folders import held_folder, sweep
from launcher.agent.processes import end_children
from launcher.backends.local import LocalBackend
from launcher.build_info import version
from launcher.join.identity import claim_name, machine_id
from launcher.join.node_session import Part, ServerLostError
from launcher.join.secret import of_node
from launcher.join.server import Membership, Server
from rendezvous.auth import write_token_file

FOLDER_PREFIX = "elastic-join-"
ORPHANS_S = 5.0  # for processes whose agent is gone to be gone too
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class JoinPlan:
    """What a node is told on its command line."""

    host: str
    port: int
    slots: int | None  # None: as many as the server says
    token_file: str | None
    run_id: str | None
    state_dir: Path
    start_timeout: float
    elastic_timeout: float
    command: tuple[str, ...] = ()  # what was typed here; the server's counts
    quiet: bool = False

    def render(self) -> str:
        """The plan for people."""
        slots = "as many as the server says" if self.slots is None else str(self.slots)
        return f"joins       {self.host}:{self.port}\nworkers     {slots}"


def join(plan: JoinPlan) -> int:
    """Take part in the job until it ends or this node is told to leave; the exit status."""
    return asyncio.run(Node(plan).run())


class Node:
    """This process, from its first attempt to join to its end; `run` once."""

    def __init__(self, plan: JoinPlan) -> None:
        self._plan = plan
        self._session = secrets.token_hex(16)
        self._server = Server(plan.host, plan.port, self._secrets, self._say)
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        """The whole life; the exit status. Raises ElasticError for what people have to mend."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._signals.put_nowait, number)
        with claim_name(self._server.place) as name:
            wish = JoinRequest(name, machine_id(), self._session, version(), self._plan.slots)
            patience, option = self._plan.start_timeout, "--start-timeout"
            while True:
                joining = asyncio.create_task(self._server.join(wish, patience, option))
                signalled = await self._unless_signalled(joining)
                if signalled is not None:
                    return 128 + signalled
                try:
                    return await self._take_part(joining.result())
                except ServerLostError as error:
                    self._say(str(error))
                patience, option = self._plan.elastic_timeout, "--elastic-timeout"

    async def _unless_signalled(self, task: asyncio.Task[Membership]) -> signal.Signals | None:
        """Wait for the task; the signal that came before its end, if one did."""
        signalled = asyncio.create_task(self._signals.get())
        await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            signalled.cancel()
            return None
        task.cancel()
        await asyncio.wait((task,))
        return signalled.result()

    async def _take_part(self, membership: Membership) -> int:
        joined = membership.joined
        sweep(FOLDER_PREFIX)
        folder = Path(tempfile.gettempdir(), FOLDER_PREFIX + secrets.token_hex(8))
        with held_folder(folder):
            token_file = write_token_file(folder / "token", joined.token)
            backend = LocalBackend(
                membership.url, token_file, orphan_files=(token_file,), joined=True
            )
            part = Part(membership, backend, self._session, self._say)
            try:
                spec = await part.read_spec()
                check_spec(spec, self._plan.command, self._say)
                count = self._plan.slots
                slots = "" if count is None else f", {count} slot{'' if count == 1 else 's'}"
                run = f"run {joined.run_id} at {self._server.place}"
                self._say(f"joined {run} as {joined.name}{slots}")
                return await part.live(self._signals)
            except UsageError:
                await part.say_goodbye("this host cannot run the job")
                raise
            finally:
                await asyncio.to_thread(backend.close, 0.0)
                await asyncio.to_thread(end_children, ORPHANS_S)  # agents' workers came to us
                part.close()

    def _secrets(self) -> tuple[str, ...]:
        plan = self._plan
        return of_node(plan.token_file, plan.run_id, plan.state_dir, plan.port)

    def _say(self, sentence: str) -> None:
        if not self._plan.quiet:
            print(f"elasticrun: {sentence}", file=sys.stderr, flush=True)


def check_spec(spec: JobSpec, typed: tuple[str, ...], say: Callable[[str], None]) -> None:
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
    if typed and typed != spec.command:
        say(f"the job runs what its server was told: {shlex.join(spec.command)}")
