"""The task of a node check: multiply matrices, exchange data with the partner, time both.

`serve` runs each task in a child of its own, one for each device of the nodes that are paired. It
meets the others through the job's rendezvous, writes one `TaskResult` and ends. Whatever goes
wrong ends it with a traceback and exit status 1; the check reads both. It never judges. Times are
seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import combinations
from urllib.parse import urlsplit

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from elastic_driver import contract
from elastic_driver.core.events import WorkerReady
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck.messages import (
    Assignment,
    Place,
    TaskResult,
    TaskSettings,
    go_key,
    place_key,
    result_key,
)
from elastic_driver.worker.nodecheck import cpu_contention, pace
from elastic_driver.worker.nodecheck.machine_lock import (
    arrive,
    is_shared,
    this_machine,
    this_stack,
    turn,
)
from elastic_driver.worker.nodecheck.model import SIZES, Size, Transformer, largest_that_fits
from rendezvous.client import RendezvousClient
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import EVENTS_PATH

_MATRIX = {"cpu": 512, "cuda": 4096}
_LATENCY_ROUNDS = 20
_BANDWIDTH_ROUNDS = 5

Turn = Callable[[Iterable[str]], AbstractContextManager[None]]  # of these machines


class Task:
    """One process of the task: its device, its group, what it is to measure."""

    def __init__(
        self,
        settings: TaskSettings,
        rank: int,
        places: Sequence[Place],
        turn: Turn = lambda _machines: contextlib.nullcontext(),
        *,
        shared: bool = False,
    ) -> None:
        """`places`: those of every rank.

        `turn` keeps processes that share a machine from timing each other; where `shared`, this
        one's machine has other hosts.
        """
        self.settings = settings
        self.place, self.places = places[rank], tuple(places)
        self.device = _device()
        # Several devices of one machine are measured at the same time: each has its own work.
        on_cpu = self.device.type == "cpu"
        self._machines = tuple(place.machine for place in places) if on_cpu else ()
        self._turn = turn
        excused = shared and on_cpu
        self._excuse = cpu_contention.of_thread() if excused else cpu_contention.none
        self._excuse_all = cpu_contention.of_process() if excused else cpu_contention.none

    def measure(self) -> TaskResult:
        """Run everything that is asked for, each thing timed by itself."""
        settings, rank = self.settings, dist.get_rank()
        step = parameters = bandwidth = latency = None
        size = SIZES[self._common_size()] if settings.model else None
        products = self._products()
        measured = [self._product_stretch(products)]
        if size is not None:
            model, batch = _make_model(size, self.device)
            parameters = sum(p.numel() for p in model.parameters())
            passes = pace.repeated(lambda: _passes(model, batch), self._settle, self._excuse)
            measured.append(passes)
        seconds = pace.best_of(measured, partial(self._turn, self._machines[rank : rank + 1]))
        compute = settings.products * seconds[0]
        if size is not None:
            step = seconds[1]
            compute += settings.model_steps * step
            model.zero_grad(set_to_none=True)
        if not all(bool(torch.isfinite(product()).all()) for product in products):
            raise ArithmeticError("the matrix products are not finite: broken memory or device")
        with self._together():
            if size is not None:
                step = self._step(model, batch) or step
            network, linked = self._exchange()
            if (settings.performance or settings.model) and dist.get_world_size() > 1:
                bandwidth, latency = self._all_reduce()
        return TaskResult(compute, network, linked, bandwidth, latency, step, parameters)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Hold the turns of all machines of the group; nobody begins before the first has them.

        They are taken once all have come here: who still computes needs its machine's turn itself.
        """
        leads = dist.get_rank() == 0
        dist.barrier()
        with self._turn(self._machines) if leads else contextlib.nullcontext():
            dist.barrier()
            yield

    # ---- computing -----------------------------------------------------------------------

    def _products(self) -> list[Callable[[], Tensor]]:
        """Matrix products: one for the device, or for each processor that we may use."""
        rows = self.settings.matrix or _MATRIX[self.device.type]

        def product() -> Callable[[], Tensor]:
            left = torch.rand(rows, rows, device=self.device)
            right = torch.rand(rows, rows, device=self.device)
            return lambda: left @ right

        many = len(os.sched_getaffinity(0)) if self.device.type == "cpu" else 1
        return [product() for _ in range(many)]

    def _product_stretch(self, products: list[Callable[[], Tensor]]) -> pace.Stretch:
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # of each product; there is one for each processor
            return pace.in_threads(products, self._excuse)
        return pace.repeated(products[0], self._settle)

    def _step(self, model: Transformer, batch: Tensor) -> float | None:
        """Seconds for the same with the gradients' all-reduce; None for a process by itself."""
        if dist.get_world_size() == 1:
            return None
        # The gradients live in the buckets that are exchanged: half the memory.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        _passes(wrapped, batch)
        dist.barrier()
        with self._timed() as stepping:
            _passes(wrapped, batch)
        return stepping()

    def _common_size(self) -> int:
        """The largest model that every process of the group has room for."""
        if self.device.type == "cpu":
            return 0
        free, _ = torch.cuda.mem_get_info(self.device)
        least = torch.tensor([largest_that_fits(free)], device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    # ---- the network ---------------------------------------------------------------------

    def _exchange(self) -> tuple[float, bool]:
        """The shortest time of the exchanges with one other node; 0 where there is none.

        And whether a link was timed: between two names on one network stack there is none. Each
        pair is timed by itself, so that in a group of three the slow one shows.
        """
        names = sorted({place.node for place in self.places})
        own = []
        for pair in combinations(names, 2):
            ranks = [rank for rank, place in enumerate(self.places) if place.node in pair]
            group = dist.group.WORLD if len(names) == 2 else dist.new_group(ranks)
            dist.barrier()
            if self.place.node in pair:
                own.append((not self._linked(ranks), self._gather(group, len(ranks))))
        within, seconds = min(own, default=(False, 0.0))
        return seconds, not within

    def _linked(self, ranks: Iterable[int]) -> bool:
        stacks = {self.places[rank].stack for rank in ranks}
        return len(stacks) > 1 or "" in stacks

    def _gather(self, group: object, size: int) -> float:
        """Seconds for the exchanges of one pair, at the pace of the best one."""
        given = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        taken = [torch.empty_like(given) for _ in range(size)]
        seconds = pace.together(
            lambda: dist.all_gather(taken, given, group=group),
            self._settle,
            _Agreeing(group, self.device),
            self._excuse_all,
        )
        if any(float(part[-1]) != 1.0 for part in taken):
            raise ArithmeticError("the exchange brought other numbers than were sent")
        return self.settings.exchanges * seconds

    def _all_reduce(self) -> tuple[float, float]:
        """Bytes a second of the payload, and seconds for the smallest one."""
        large = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        small = torch.ones(1, device=self.device)
        seconds = self._reduce(large, _BANDWIDTH_ROUNDS)
        latency = self._reduce(small, _LATENCY_ROUNDS)
        return large.numel() * large.element_size() / seconds, latency

    def _reduce(self, tensor: Tensor, rounds: int) -> float:
        dist.all_reduce(tensor)
        dist.barrier()
        with self._timed() as elapsed:
            for _ in range(rounds):
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
        return max(elapsed(), 1e-9) / rounds

    @contextlib.contextmanager
    def _timed(self) -> Iterator[Callable[[], float]]:
        """Seconds the block took, the device's queue included; read it after the block."""
        self._settle()
        began, ended = time.perf_counter(), [0.0]
        yield lambda: ended[0] - began
        self._settle()
        ended[0] = time.perf_counter()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Agreeing:
    """A `pace.Group` over a process group."""

    def __init__(self, group: object, device: torch.device) -> None:
        self._group, self._device = group, device

    def longest(self, times: Sequence[float]) -> list[float]:
        return self._reduce(times, dist.ReduceOp.MAX)

    def sums(self, times: Sequence[float]) -> list[float]:
        return self._reduce(times, dist.ReduceOp.SUM)

    def _reduce(self, times: Sequence[float], how: object) -> list[float]:
        numbers = torch.tensor(times, dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, how, group=self._group)
        return [float(number) for number in numbers.tolist()]


def _make_model(size: Size, device: torch.device) -> tuple[Transformer, Tensor]:
    """The transformer, and made-up data to train it on."""
    torch.manual_seed(0)
    model = Transformer(size).to(device)
    return model, torch.randint(size.vocabulary, (size.batch, size.tokens), device=device)


def _passes(model: Callable[[Tensor], Tensor], batch: Tensor) -> None:
    model(batch).backward()


def _device() -> torch.device:
    """The device of our slot; several processes may share the last one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    slot = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", min(slot, torch.cuda.device_count() - 1))
    torch.cuda.set_device(device)
    return device


def choose_interface(endpoint: str) -> None:
    """Let the libraries use the interface that reaches the rendezvous, unless one was named."""
    parts = urlsplit(endpoint)
    host, port = str(parts.hostname), parts.port or 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        address = probe.getsockname()[0]
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == address for entry in entries):
                for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    os.environ.setdefault(variable, name)
                return


def _await_go(client: RendezvousClient, worker: str, task: int, timeout: float) -> None:
    """Say that we are up, and wait for the others of the round to be so
    (`policies.nodecheck.gate`)."""
    ready = WorkerReady(worker, task, -1, clean=True, reason="ready to measure")
    client.post_json(EVENTS_PATH, msgspec.json.encode(ready))
    until = time.monotonic() + timeout
    while client.get(go_key(task), wait=max(0.0, until - time.monotonic())) is None:
        if time.monotonic() >= until:
            raise ClusterError(f"not told to begin within {timeout:g} s")


def run(
    client: RendezvousClient, worker: str, assignment: Assignment, settings: TaskSettings
) -> None:
    """Meet the other processes of this task, measure with them, write the result."""
    timeout = timedelta(seconds=settings.timeout)
    task, size = assignment.task, assignment.size
    places = _meet(client, task, assignment, settings.timeout)
    machine = places[assignment.rank].machine
    store = HTTPStore(client, contract.round_prefix(task) + "torch/", timeout)
    backend = "nccl" if _device().type == "cuda" else "gloo"  # and NCCL uses it from the start
    dist.init_process_group(
        backend, store=store, rank=assignment.rank, world_size=size, timeout=timeout
    )
    try:
        arrive(client, machine, contract.host_of_worker(worker))
        _await_go(client, worker, task, settings.timeout)
        shared = is_shared(client, machine)
        turns = partial(turn, client, worker)
        result = Task(settings, assignment.rank, places, turns, shared=shared).measure()
        client.set(result_key(task, worker), msgspec.json.encode(result))
        dist.barrier()  # nobody leaves while another still needs it
    finally:
        dist.destroy_process_group()
        store.close()


def _meet(
    client: RendezvousClient, task: int, assignment: Assignment, timeout: float
) -> list[Place]:
    """Where everybody of the group is, by rank."""
    own = Place(node=assignment.node, machine=this_machine(), stack=this_stack())
    client.set(place_key(task, assignment.rank), msgspec.json.encode(own))
    until = time.monotonic() + timeout
    places = []
    for rank in range(assignment.size):
        while (
            entry := client.get(place_key(task, rank), max(0.0, until - time.monotonic()))
        ) is None:
            if time.monotonic() >= until:
                raise ClusterError(f"rank {rank} of the group did not come within {timeout:g} s")
        places.append(msgspec.json.decode(entry.value, type=Place))
    return places
