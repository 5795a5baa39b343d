"""The workers of one host: carries out the driver's orders about them.

Starts processes and connects their output, follows each to its end, and reports both. The driver
alone decides which workers there are, and when they stop.
"""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

from elastic_driver import contract
from elastic_driver.console import Console
from elastic_driver.contract import no_port_left
from elastic_driver.errors import ExitCode
from elastic_driver.failure_causes import looks_like_peer_loss
from elastic_driver.token_roles import worker_token
from elastic_driver.words.orders import JobSpec, RanksOrder, StartWorkerOrder, time_to_leave
from elastic_driver.words.tf_config import own_port
from elastic_driver.words.wire_events import RunningWorker, WorkerExited, WorkerStack, WorkerStarted
from launcher.agent import processes
from launcher.agent.driver_link import Record
from launcher.agent.environment import (
    Meeting,
    choose,
    gpu_nodes,
    in_words,
    usable_cores,
    worker_environment,
)
from launcher.agent.host import MemoryJudge
from launcher.agent.output import WorkerOutput, link_ranks
from launcher.agent.processes import (
    EXIT_NOT_EXECUTABLE,
    ProcessSpec,
    StartError,
    WorkerProcess,
    is_terminal,
    stack_of,
)
from launcher.agent.warm.starter import WorkerStarter
from rendezvous.auth import Credentials, write_token_file
from rendezvous.errors import TokenError

DRAIN_S = 2.0  # for pipes to end; a process that we cannot kill may hold them open


class Workers:
    """All workers this agent has started and not yet reported as ended.

    Args:
        spec: what every worker runs.
        meeting: where they find the rendezvous.
        own: the agent's credentials; the tokens of workers are derived from its token.
        starter: starts their processes.
        consoles: our stdout and stderr.
        report: takes the events for the driver, in order.
        say: shows a sentence to the user.
        record: takes the lines of workers for the driver; None: it wants none.
        stdin: what workers read; None: nothing.
    """

    def __init__(
        self,
        spec: JobSpec,
        meeting: Meeting,
        own: Credentials,
        starter: WorkerStarter,
        consoles: tuple[Console, Console],
        *,
        report: Callable[[WorkerStarted | WorkerExited | WorkerStack], None],
        say: Callable[[str], None],
        record: Record | None = None,
        stdin: int | None = None,
    ) -> None:
        self._spec = spec
        self._meeting = meeting
        self._starter = starter
        self._own = own
        self._record = record
        self._stdin = stdin
        self._consoles = consoles
        self._report = report
        self._say = say
        self._inherited = dict(os.environ)
        self._memory = MemoryJudge()
        self._log_dir = None if spec.log_dir is None else Path(spec.cwd, spec.log_dir)
        self._bound: dict[str, frozenset[int]] = {}  # workers whose start is to be reported
        self._leaders: set[int] = set()  # pids of workers that are not reaped yet
        self._running: dict[str, tuple[WorkerProcess, WorkerOutput]] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._pending: set[str] = set()  # ordered, not started, not stopped
        # Every worker ever ordered, with its status once that was reported: none is started twice.
        self._known: dict[str, int | None] = {}

    def story(self) -> tuple[RunningWorker, ...]:
        """Return the workers whose end was not reported yet."""
        here = (worker for worker, status in self._known.items() if status is None)
        return tuple(
            RunningWorker(w, self._running[w][0].pid if w in self._running else 0) for w in here
        )

    def pids(self) -> dict[str, int]:
        """Return the workers that run and their pids; any thread may call this."""
        return {worker: process.pid for worker, (process, _) in self._running.copy().items()}

    def driver_moved(self, url: str) -> None:
        """Let workers that are started from now on begin with this address of the driver."""
        self._meeting = dataclasses.replace(self._meeting, endpoint=url)

    def read_nothing(self) -> None:
        """Give workers that are started from now on no stdin: the command that had it has ended."""
        if self._stdin is not None:
            os.close(self._stdin)
        self._stdin = None

    def start(self, order: StartWorkerOrder) -> None:
        """Start a worker as soon as the starter is ready; a failure is reported as its end.

        Several are started in the order of the calls. An end that was reported is reported again:
        the driver that orders this worker does not know of it.
        """
        if order.worker in self._known:
            status = self._known[order.worker]
            if status is not None:
                self._report(WorkerExited(order.worker, status, "an earlier driver had started it"))
            return
        self._known[order.worker] = None
        self._pending.add(order.worker)
        life = asyncio.get_running_loop().create_task(self._live(order))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    def stop(self, worker: str, grace: float) -> None:
        """Stop a worker, or do not start it at all; harmless if it has ended or is unknown."""
        self._pending.discard(worker)
        if worker in self._running:
            self._running[worker][0].stop(grace)

    def stop_all(self, grace: float, *, interrupt: bool = False) -> None:
        """Stop every worker; `interrupt`: by SIGINT first."""
        self._pending.clear()
        for process, _ in self._running.values():
            process.stop(grace, interrupt=interrupt)

    def leave(self, notice: float) -> None:
        """Have every worker leave within `notice` seconds, at a step boundary if it can.

        Those that are here shortly before are stopped.
        """
        self._pending.clear()
        for process, _ in self._running.values():
            process.give_notice()
        patience = time_to_leave(notice)
        asyncio.get_running_loop().call_later(patience, self.stop_all, notice - patience)

    def rank(self, order: RanksOrder) -> None:
        """Show the ranks of a complete round from now on, and link them to the files."""
        for worker, rank in order.ranks.items():
            if worker in self._running:
                self._running[worker][1].rank = rank
        if self._log_dir is not None:
            try:
                link_ranks(self._log_dir, order.round, order.ranks)
            except OSError as error:
                self._say(f"cannot link the ranks of round {order.round} to their logs: {error}")

    def look(self, number: int) -> None:
        """Report the stack of every worker, as seen from outside; one look at a time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(number))

    async def _look(self, number: int) -> None:
        for worker, running in tuple(self._running.items()):
            if self._running.get(worker) is running:
                seen = await stack_of(running[0].pid)
                self._report(WorkerStack(worker, number, seen.where, seen.stack, own=False))

    async def all_ended(self) -> None:
        """Wait until no worker is left; the caller has stopped them."""
        while self._lives:
            await asyncio.wait(set(self._lives))

    async def end_strays(self) -> None:
        """Kill every process below us that is neither a worker nor the starter's."""
        await processes.end_all(self.strays)

    def strays(self) -> list[int]:
        """Return the living strays; reap those that have ended by themselves.

        A stray is a process that lost its parent and came to us. Strays descend from workers,
        because nothing else below the agent starts processes. A running py-spy counts as one too.
        """
        own = self._leaders | self._starter.own_pids()
        here = processes.children()
        return [pid for pid in here if pid not in own and processes.reap(pid) is None]

    # ---- one worker's life ---------------------------------------------------------------

    async def _live(self, order: StartWorkerOrder) -> None:
        """Follow a worker from the order to the report of its end."""
        await self._starter.ready()
        worker = order.worker
        if worker not in self._pending:
            self._ended(WorkerExited(worker, -signal.SIGTERM, "stopped before it was started"))
            return
        self._pending.discard(worker)
        try:
            output = WorkerOutput(
                order,
                self._spec,
                self._log_dir,
                self._consoles,
                self._say,
                record=self._record,
                on_terminal=is_terminal(self._stdin),
            )
        except (OSError, ValueError) as error:
            self._ended(WorkerExited(worker, EXIT_NOT_EXECUTABLE, f"cannot start: {error}"))
            return
        before = self._memory.begin()
        try:
            process = self._execute(order, output)
        except (StartError, TokenError) as error:
            self._meeting.token_file(worker).unlink(missing_ok=True)
            output.finish(failed=True)
            self._ended(WorkerExited(worker, error.exit_code, str(error)))
            return
        self._running[worker] = process, output
        self._report(WorkerStarted(worker, process.pid, in_words(self._bound.pop(worker, ()))))
        code = await process.ended()
        self._leaders.discard(process.pid)
        await output.drained(DRAIN_S)
        self._meeting.token_file(worker).unlink(missing_ok=True)
        tail = output.finish(failed=code != 0)
        del self._running[worker]
        # A worker that was killed is no victim of another's failure, whatever it logged before.
        failed = code > 0 or code == -signal.SIGABRT
        short = self._memory.judge(before, code, tail, process.peak)
        victim = failed and short is None and looks_like_peer_loss(tail)
        self._ended(WorkerExited(worker, code, tail, victim=victim, out_of_memory=short))

    def _ended(self, event: WorkerExited) -> None:
        self._known[event.worker] = event.exit_code
        self._report(event)

    def _cpus_of(self, order: StartWorkerOrder, env: dict[str, str]) -> frozenset[int]:
        """Return the processors that a worker is bound to; none without --bind.

        The only worker of a host gets a thread for each of its cores, unless the user says more.
        """
        if self._spec.bind == "none":
            return frozenset()
        slot, slots = order.place.slot, order.slots or order.place.local_size
        cores = usable_cores()
        cpus = choose(self._spec.bind, slot, slots, cores, gpu_nodes(env))
        if order.place.local_size == 1:  # others have one thread each
            own = sum(not cpus.isdisjoint(core.cpus) for core in cores)
            env.setdefault("OMP_NUM_THREADS", str(own))
        return cpus

    def _check_server(self, order: StartWorkerOrder) -> None:
        """Raise StartError where the server of a TensorFlow task has no port of --ports."""
        ports, config = self._spec.ports, order.tf_config
        if ports is None or config is None:
            return
        port = own_port(config)
        if port is not None and not ports[0] <= port <= ports[1]:
            sentence = no_port_left(ports, "TensorFlow", self._meeting.host)
            raise StartError(sentence, ExitCode.USAGE)

    def _execute(self, order: StartWorkerOrder, output: WorkerOutput) -> WorkerProcess:
        env = worker_environment(self._inherited, self._spec, order, self._meeting)
        self._check_server(order)
        fds = output.stdout.child_fd, output.stderr.child_fd
        token = worker_token(self._own.token, order.worker)
        file = self._meeting.token_file(order.worker)
        write_token_file(file, token, self._own.fingerprint)
        cpus = self._cpus_of(order, env)
        spec = ProcessSpec(
            self._spec.command, env, self._spec.cwd, *fds, stdin_fd=self._stdin, cpus=cpus
        )
        output.pid = pid = self._starter.start(spec)
        self._bound[order.worker] = cpus
        output.close_child_side()
        marks = {contract.RUN_ID: self._spec.run_id, contract.WORKER_ID: order.worker}
        self._leaders.add(pid)
        return WorkerProcess(pid, self.strays, marks)
