"""The workers of one host: carries out what the orders say about them.

Starts processes and connects their output, follows each to its end, and reports both. Which
workers there are, and when they stop, is the driver's decision alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec, RanksOrder, StartWorkerOrder
from elastic_driver.core.events import WorkerExited, WorkerStack, WorkerStarted
from elastic_driver.peer_loss import looks_like_peer_loss
from launcher.agent.console import Console
from launcher.agent.environment import Meeting, worker_environment
from launcher.agent.output import ERR, OUT, LogFile, WorkerOutput, link_ranks, route
from launcher.agent.processes import (
    EXIT_NOT_EXECUTABLE,
    Family,
    ProcessSpec,
    Starter,
    StartError,
    WorkerProcess,
)
from launcher.agent.stacks import look

DRAIN_S = 2.0  # for pipes that a process out of our reach still holds open


class Workers:
    """All workers this agent has started and not yet reported as ended.

    Args:
        spec: what every worker runs.
        meeting: where they find the rendezvous.
        starter: brings processes to life.
        consoles: our stdout and stderr.
        report: takes the events for the driver, in order.
        say: tells people a sentence.
        inherited: the environment that workers start from.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        meeting: Meeting,
        starter: Starter,
        consoles: tuple[Console, Console],
        report: Callable[[WorkerStarted | WorkerExited | WorkerStack], None],
        say: Callable[[str], None],
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        self._spec, self._meeting, self._starter = spec, meeting, starter
        self._consoles = consoles
        self._report, self._say = report, say
        self._inherited = dict(os.environ if inherited is None else inherited)
        self._log_dir = None if spec.log_dir is None else Path(spec.cwd, spec.log_dir)
        self._family = Family(starter.own_pids)
        self._processes: dict[str, WorkerProcess] = {}
        self._outputs: dict[str, WorkerOutput] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._pending: set[str] = set()  # ordered, not started, not stopped
        self._known: set[str] = set()  # every worker ever ordered: none is started twice

    def start(self, order: StartWorkerOrder) -> None:
        """Start a worker as soon as the starter is ready; what goes wrong is told as its end.

        Several are started in the order of the calls.
        """
        worker = order.worker
        if worker in self._known:
            return
        self._known.add(worker)
        self._pending.add(worker)
        life = asyncio.get_running_loop().create_task(self._live(order))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    def stop(self, worker: str, grace: float) -> None:
        """Stop a worker, or do not start it at all; harmless when it is not there (any more)."""
        self._pending.discard(worker)
        if (process := self._processes.get(worker)) is not None:
            process.stop(grace)

    def stop_all(self, grace: float) -> None:
        """Stop every worker."""
        self._pending.clear()
        for process in self._processes.values():
            process.stop(grace)

    def rank(self, order: RanksOrder) -> None:
        """A round is complete: show these ranks from now on, and link them to the files."""
        for worker, rank in order.ranks.items():
            if (output := self._outputs.get(worker)) is not None:
                output.rank = rank
        if self._log_dir is not None:
            try:
                link_ranks(self._log_dir, order.round, order.ranks)
            except OSError as error:
                self._say(f"cannot link the ranks of round {order.round} to their logs: {error}")

    def look(self, number: int) -> None:
        """Report where every worker stands, as seen from outside; one look at a time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(number))

    async def _look(self, number: int) -> None:
        for worker, process in tuple(self._processes.items()):
            if self._processes.get(worker) is process:
                seen = await look(process.pid, self._family.onlookers)
                stack = WorkerStack(worker, number, seen.where, seen.stack, own=False)
                self._report(stack)

    async def all_ended(self) -> None:
        """Wait until no worker is left; whoever calls has stopped them."""
        while self._lives:
            await asyncio.wait(set(self._lives))

    async def end_strays(self) -> None:
        """Kill every process below us that is neither a worker nor the starter's."""
        await self._family.end_strays(lambda _pid: True)

    def reap_strays(self) -> None:
        """Collect strays that have ended by themselves."""
        self._family.strays()

    # ---- one worker's life ---------------------------------------------------------------

    async def _live(self, order: StartWorkerOrder) -> None:
        """From the order to the report of its end."""
        await self._starter.ready()
        worker = order.worker
        if worker not in self._pending:
            self._report(WorkerExited(worker, -signal.SIGTERM, "stopped before it was started"))
            return
        self._pending.discard(worker)
        try:
            output = self._connect(order)
        except (OSError, ValueError) as error:
            self._report(WorkerExited(worker, EXIT_NOT_EXECUTABLE, f"cannot start: {error}"))
            return
        try:
            process = self._execute(order, output)
        except StartError as error:
            output.finish(failed=True)
            self._report(WorkerExited(worker, error.exit_code, str(error)))
            return
        self._processes[worker], self._outputs[worker] = process, output
        self._report(WorkerStarted(worker, process.pid))
        code = await process.ended()
        await output.drained(DRAIN_S)
        tail = output.finish(failed=code != 0)
        del self._processes[worker], self._outputs[worker]
        # A process that was killed did not fall by itself, whatever it logged before.
        fell = code > 0 or code == -signal.SIGABRT
        self._report(WorkerExited(worker, code, tail, victim=fell and looks_like_peer_loss(tail)))

    def _execute(self, order: StartWorkerOrder, output: WorkerOutput) -> WorkerProcess:
        env = worker_environment(self._inherited, self._spec, order, self._meeting)
        stdout_fd, stderr_fd = output.child_fds
        spec = ProcessSpec(self._spec.command, env, self._spec.cwd, stdout_fd, stderr_fd)
        output.pid = pid = self._starter.start(spec)
        output.close_child_side()
        marks = {contract.RUN_ID: self._spec.run_id, contract.WORKER_ID: order.worker}
        return WorkerProcess(pid, self._family, marks)

    def _connect(self, order: StartWorkerOrder) -> WorkerOutput:
        routing = route(self._spec, order.place.slot)
        out, err = self._consoles
        return WorkerOutput(
            order.place.rank,
            (
                out if routing.to_console & OUT else None,
                err if routing.to_console & ERR else None,
            ),
            (
                self._open_log(order.worker, "stdout") if routing.to_file & OUT else None,
                self._open_log(order.worker, "stderr") if routing.to_file & ERR else None,
            ),
            timestamp=self._spec.timestamp,
            on_trouble=self._say,
        )

    def _open_log(self, worker: str, stream: str) -> LogFile | None:
        if self._log_dir is None:
            return None
        path = self._log_dir / worker / f"{stream}.log"
        try:
            return LogFile(path)
        except OSError as error:
            self._say(f"cannot open {path} ({error.strerror}); it will be missing")
            return None
