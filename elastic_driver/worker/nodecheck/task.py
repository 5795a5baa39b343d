"""The task of a node check: multiply matrices, exchange data with the partner, time both.

`serve` runs each task in a child of its own, one for each device of the paired nodes. It meets the
others through the job's rendezvous, writes one `TaskResult` and ends. Any failure ends it with a
traceback and exit status 1; the check reads both. It never judges. Times are seconds.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import combinations

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from elastic_driver import contract
from elastic_driver.core.events import WorkerReady
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck import messages
from elastic_driver.policies.nodecheck.messages import Assignment, Place, TaskResult, TaskSettings
from elastic_driver.worker import cpu_time
from elastic_driver.worker.context import address_towards
from elastic_driver.worker.nodecheck import machine_lock, pace
from elastic_driver.worker.nodecheck.model import SIZES, Transformer, largest_that_fits
from rendezvous.client import RendezvousClient
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import EVENTS_PATH

_MATRIX_ROWS = {"cpu": 512, "cuda": 4096}
_LATENCY_CALLS = 20
_BANDWIDTH_CALLS = 5

MachineLock = Callable[[Iterable[str]], AbstractContextManager[None]]  # of these machines


class NodeCheckTask:
    """One process of the task, with its device and its group."""

    def __init__(
        self,
        settings: TaskSettings,
        rank: int,
        places: Sequence[Place],
        lock: MachineLock = lambda _machines: contextlib.nullcontext(),
        *,
        shared: bool = False,
    ) -> None:
        """Prepare the measurements of one process.

        Args:
            settings: the sizes and numbers of what is measured.
            rank: of this process in the group.
            places: of every rank.
            lock: keeps processes that share a machine from timing each other.
            shared: whether this process's machine has other hosts.
        """
        self.settings = settings
        self.place, self.places = places[rank], tuple(places)
        self.device = _device()
        # Several devices of one machine are measured at the same time: each has its own work.
        on_cpu = self.device.type == "cpu"
        self._machines = tuple(place.machine for place in places) if on_cpu else ()
        self._lock = lock
        self._thread_contention = self._contention = cpu_time.not_timed
        if shared and on_cpu:
            self._thread_contention = cpu_time.of_thread()
            self._contention = cpu_time.of_process()

    def measure(self) -> TaskResult:
        """Measure everything that the settings ask for, each thing by itself."""
        settings, rank = self.settings, dist.get_rank()
        step = parameters = bandwidth = latency = None
        size = SIZES[self._common_size()] if settings.model else None
        products = self._products()
        timings = [self._product_timing(products)]
        if size is not None:
            torch.manual_seed(0)
            model = Transformer(size).to(self.device)
            batch = torch.randint(size.vocabulary, (size.batch, size.tokens), device=self.device)
            parameters = sum(p.numel() for p in model.parameters())
            contention = self._thread_contention
            timings.append(pace.repeated(lambda: model(batch).backward(), self._settle, contention))
        seconds = pace.best_of(timings, partial(self._lock, self._machines[rank : rank + 1]))
        compute = settings.products * seconds[0]
        if size is not None:
            step = seconds[1]
            compute += settings.model_steps * step
            model.zero_grad(set_to_none=True)
        if not all(bool(torch.isfinite(product()).all()) for product in products):
            raise ArithmeticError("the matrix products are not finite: broken memory or device")
        with self._all_locks():
            if size is not None:
                step = self._step(model, batch) or step
            network, linked = self._exchange()
            if (settings.performance or settings.model) and dist.get_world_size() > 1:
                bandwidth, latency = self._all_reduce()
        return TaskResult(compute, network, linked, bandwidth, latency, step, parameters)

    @contextlib.contextmanager
    def _all_locks(self) -> Iterator[None]:
        """Hold the locks of all machines of the group; rank 0 takes them for all ranks.

        It takes them once all ranks are here: a rank that still computes needs its machine's lock.
        """
        dist.barrier()
        with self._lock(self._machines if dist.get_rank() == 0 else ()):
            dist.barrier()
            yield

    # ---- computing -----------------------------------------------------------------------

    def _products(self) -> list[Callable[[], Tensor]]:
        """Return matrix products: one for the device, or one for each usable processor."""
        rows = self.settings.matrix or _MATRIX_ROWS[self.device.type]
        count = len(os.sched_getaffinity(0)) if self.device.type == "cpu" else 1
        factors = [torch.rand(2, rows, rows, device=self.device) for _ in range(count)]
        return [partial(torch.matmul, left, right) for left, right in factors]

    def _product_timing(self, products: list[Callable[[], Tensor]]) -> pace.Timing:
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # of each product; there is one for each processor
            return pace.in_threads(products, self._thread_contention)
        return pace.repeated(products[0], self._settle)

    def _step(self, model: Transformer, batch: Tensor) -> float | None:
        """Return the seconds of a pass with the gradients' all-reduce; None for one process."""
        if dist.get_world_size() == 1:
            return None
        # The gradients live in the buckets that are exchanged: half the memory.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped(batch).backward()
        dist.barrier()
        return self._seconds(lambda: wrapped(batch).backward())

    def _common_size(self) -> int:
        """Return the index of the largest model that every process has room for."""
        if self.device.type == "cpu":
            return 0
        free, _ = torch.cuda.mem_get_info(self.device)
        least = torch.tensor([largest_that_fits(free)], device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    # ---- the network ---------------------------------------------------------------------

    def _exchange(self) -> tuple[float, bool]:
        """Return the seconds of the exchanges with the fastest partner node; 0 without one.

        The second value says whether a link was timed: two hosts on one network stack have none.
        Each pair is timed by itself, so that the slow node of a group of three shows.
        """
        nodes = sorted({place.node for place in self.places})
        own = []
        for pair in combinations(nodes, 2):
            ranks = [rank for rank, place in enumerate(self.places) if place.node in pair]
            group = dist.group.WORLD if len(nodes) == 2 else dist.new_group(ranks)
            dist.barrier()
            if self.place.node in pair:
                stacks = {self.places[rank].stack for rank in ranks}
                within_stack = len(stacks) == 1 and "" not in stacks
                own.append((within_stack, self._gather(group, len(ranks))))
        within_stack, seconds = min(own, default=(False, 0.0))
        return seconds, not within_stack

    def _gather(self, group: object, size: int) -> float:
        """Return the seconds of the exchanges of one pair, each as fast as the best one."""
        given = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        taken = [torch.empty_like(given) for _ in range(size)]
        seconds = pace.together(
            lambda: dist.all_gather(taken, given, group=group),
            self._settle,
            pace.TimingGroup(group, self.device),
            self._contention,
        )
        if any(float(part[-1]) != 1.0 for part in taken):
            raise ArithmeticError("the exchange brought other numbers than were sent")
        return self.settings.exchanges * seconds

    def _all_reduce(self) -> tuple[float, float]:
        """Return bytes a second of the payload, and the seconds of the smallest all-reduce."""
        large = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        small = torch.ones(1, device=self.device)
        seconds = self._seconds_of_sum(large, _BANDWIDTH_CALLS)
        latency = self._seconds_of_sum(small, _LATENCY_CALLS)
        return large.numel() * large.element_size() / seconds, latency

    def _seconds_of_sum(self, tensor: Tensor, calls: int) -> float:
        def reduce() -> None:
            for _ in range(calls):
                dist.all_reduce(tensor)
                tensor.div_(dist.get_world_size())

        dist.all_reduce(tensor)
        dist.barrier()
        return max(self._seconds(reduce), 1e-9) / calls

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work`, including the device's queue."""
        self._settle()
        began = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - began

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _device() -> torch.device:
    """Return the device of our slot; several processes may share the last one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    slot = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", min(slot, torch.cuda.device_count() - 1))
    torch.cuda.set_device(device)
    return device


def choose_interface(endpoint: str) -> None:
    """Let gloo and NCCL use the interface that reaches the rendezvous, unless one is set."""
    address = address_towards(endpoint)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
            return


def run(
    client: RendezvousClient, worker: str, assignment: Assignment, settings: TaskSettings
) -> None:
    """Meet the other processes of this task, measure with them, write the result."""
    task, rank, size = assignment.task, assignment.rank, assignment.size
    timeout = timedelta(seconds=settings.timeout)
    places = _meet(client, assignment, settings.timeout)
    machine = places[rank].machine
    store = HTTPStore(client, contract.round_prefix(task) + "torch/", timeout)
    backend = "nccl" if _device().type == "cuda" else "gloo"  # and NCCL uses it from the start
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        machine_lock.register_host(client, machine, contract.host_of_worker(worker))
        ready = WorkerReady(worker, task, -1, clean=True, reason="ready to measure")
        client.post_json(EVENTS_PATH, msgspec.json.encode(ready))
        until = time.monotonic() + settings.timeout  # `policies.nodecheck.gate` lets all begin
        if _await(client, messages.go_key(task), until) is None:
            raise ClusterError(f"the driver did not let it begin within {settings.timeout:g} s")
        shared = machine_lock.is_shared(client, machine)
        lock = partial(machine_lock.lock, client, worker)
        result = NodeCheckTask(settings, rank, places, lock, shared=shared).measure()
        client.set(messages.result_key(task, worker), msgspec.json.encode(result))
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()
        store.close()


def _meet(client: RendezvousClient, assignment: Assignment, timeout: float) -> list[Place]:
    """Publish our place; return the places of all ranks of the group."""
    machine, stack = machine_lock.this_machine(), machine_lock.this_stack()
    own = Place(node=assignment.node, machine=machine, stack=stack)
    client.set(messages.place_key(assignment.task, assignment.rank), msgspec.json.encode(own))
    until = time.monotonic() + timeout
    places = []
    for rank in range(assignment.size):
        place = _await(client, messages.place_key(assignment.task, rank), until)
        if place is None:
            raise ClusterError(f"rank {rank} of the group did not come within {timeout:g} s")
        places.append(msgspec.json.decode(place, type=Place))
    return places


def _await(client: RendezvousClient, key: str, until: float) -> bytes | None:
    """Return the value of a key once it is written; None after the monotonic time `until`."""
    while (entry := client.get(key, wait=max(0.0, until - time.monotonic()))) is None:
        if time.monotonic() >= until:
            return None
    return entry.value
