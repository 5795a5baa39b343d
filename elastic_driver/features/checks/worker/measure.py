"""The measurements of a node check: multiplies matrices, exchanges data with the partner.

`serve` runs each task in a child process, one for each device of the paired nodes. Any failure
ends the child with a traceback and exit status 1; the check reads both. The driver compares.

A task can also train a transformer on random data, as large as the device has room for. Sizes are
GPT-2's (Radford et al. 2019, table 2); on a CPU the model is small and takes seconds. There is no
optimizer: parameters, gradients and activations load the device and the links as training does.
Times are seconds.

Times work on this node so that short disturbances do not count and lasting ones do.

The best of several intervals counts. An interval is long enough to show what makes a node slow for
good: a CPU quota lets a process run at full speed and then stops it for the rest of a period,
usually 0.1 s, so the fastest single call would look healthy. It is short enough that a passing
disturbance (another program's second, a page cache) spoils one interval and not all of them; for
the same reason there is a pause between two of them. Times are seconds.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from elastic_driver.features.checks.messages import Place, TaskResult, TaskSettings
from elastic_driver.worker.heartbeat.training_progress import (
    CpuAccount,
    CpuTime,
    cpu_of_process,
    cpu_of_thread,
)

WARM_UP_S = 0.1  # loads libraries, and uses up what a quota has saved for an idle process
INTERVAL_S = 0.3  # several periods of a quota
INTERVALS = 3
PATIENCE = 2.0  # times the expected time of all intervals; after that no further one begins
PAUSE_S = 0.05  # between two intervals: other hosts on the machine get its lock
TOGETHER_S = 2.5  # of all calls that are timed together with other ranks
TOGETHER_CALLS = (3, 80)  # at least, for slow links, and at most
_LEAST_SHARE = 0.01  # of an interval that counts, whatever is subtracted
AGREE_FACTOR = 1.1  # two times agree if one is at most this times the other

Work = Callable[[], object]
Timing = Callable[[float], float]  # runs at least so many seconds; returns the seconds of a call
Lock = Callable[[], AbstractContextManager[None]]
# Combines the times of all ranks, element by element; a collective.
Reduce = Callable[[Sequence[float], object], list[float]]


def repeated(work: Work, settle: Work = lambda: None, account: CpuAccount = CpuTime) -> Timing:
    """Return the timing of calls one after the other.

    `settle` waits for the device after a call; time that `account` calls lost does not count.
    """

    def timing(least: float) -> float:
        settle()
        before = account()
        began, calls = time.perf_counter(), 0
        while True:
            work()
            settle()
            calls += 1
            passed = time.perf_counter() - began
            if passed >= least:
                lost = account().since(before).waited
                return max(passed - lost, passed * _LEAST_SHARE) / calls

    return timing


def in_threads(works: Sequence[Work], account: CpuAccount = CpuTime) -> Timing:
    """Return the timing of independent calls, each of `works` in a thread of its own.

    A thread that loses time to another program holds up no other, as it would in one product of
    all threads. The result is the seconds a call of all threads together.
    """

    def timing(least: float) -> float:
        def rate(work: Work) -> float:
            return 1 / repeated(work, account=account)(least)

        with ThreadPoolExecutor(len(works)) as pool:
            return 1 / sum(pool.map(rate, works))

    return timing


def best_of(
    timings: Sequence[Timing], lock: Lock, interval: float = INTERVAL_S, intervals: int = INTERVALS
) -> list[float]:
    """Return the seconds a call of each timing in its best interval; `lock` is held during each.

    No further interval begins where the best two agree, or single calls take far too long.
    """
    times: list[list[float]] = [[] for _ in timings]
    left = PATIENCE * interval * intervals * len(timings)
    for number in range(intervals):
        agree = number > 1 and all(sorted(own)[1] <= AGREE_FACTOR * min(own) for own in times)
        if agree or (number and left <= 0):
            break
        if number:
            time.sleep(PAUSE_S)
        with lock():
            began = time.perf_counter()
            for timing, own in zip(timings, times, strict=True):
                timing(min(WARM_UP_S, interval))
                own.append(timing(interval))
            left -= time.perf_counter() - began
    return [min(own) for own in times]


def together(work: Work, settle: Work, reduce: Reduce, account: CpuAccount = CpuTime) -> float:
    """Return the seconds of the fastest of several calls; all ranks make the same number of calls.

    All ranks begin each call together, and its time is that of the slowest rank: a sender is done
    once the kernel has taken its data, long before a narrow link has carried them. A single call
    can be timed, because an exchange moves more than a shaped link passes at once. CPU time that
    any rank lost to other programs has delayed all and does not count; CPU time of work does.
    """
    work()
    settle()
    (once,) = reduce([repeated(work, settle)(0.0)], ReduceOp.MAX)
    least, most = TOGETHER_CALLS
    spans, used = [], []
    for _ in range(max(least, min(most, int(TOGETHER_S / max(once, 1e-6))))):
        reduce([0.0], ReduceOp.MAX)
        before, began = account(), time.perf_counter()
        work()
        settle()
        spans.append(time.perf_counter() - began)
        used.append(account().since(before))
    waited = reduce([u.waited for u in used], ReduceOp.SUM)
    ran = reduce([u.ran for u in used], ReduceOp.MAX)
    calls = zip(reduce(spans, ReduceOp.MAX), waited, ran, strict=True)
    return min(max(span - lost, min(span, busy), span * _LEAST_SHARE) for span, lost, busy in calls)


_MATRIX_ROWS, _MATRIX_ROWS_OF_A_DEVICE = 512, 4096
_LATENCY_CALLS = 20
_BANDWIDTH_CALLS = 5

MEMORY_SHARE = 0.85  # of a device's free memory that may be used
_BYTES = 4  # single precision
_KEPT_PER_TOKEN = 20  # activations kept for the backward pass, in units of the width, per layer
_LOGIT_COPIES = 4  # logits, their softmax, gradients
_RESERVE = 512 * 1024 * 1024  # of a device: library workspaces, the matrices, the exchange

Locks = Callable[[Iterable[str]], AbstractContextManager[None]]  # of these machines


@dataclass(frozen=True)
class ModelSize:
    """Shape of a decoder-only transformer and of its random batch."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int  # in a sequence
    batch: int = 1

    @property
    def parameters(self) -> int:
        """Return the number of parameters: embeddings (shared with the output) and blocks."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.tokens + 2) * self.width

    @property
    def needed(self) -> int:
        """Return the bytes of parameters, gradients (which are DDP's buckets) and activations."""
        token = _KEPT_PER_TOKEN * self.width + 2 * self.heads * self.tokens
        activations = self.layers * self.tokens * token
        logits = _LOGIT_COPIES * self.tokens * self.vocabulary
        return _BYTES * (2 * self.parameters + self.batch * (activations + logits))


SMALLEST = ModelSize("on a CPU", 2, 128, 4, 1000, 64, batch=2)
SIZES = (
    SMALLEST,
    ModelSize("124M", 12, 768, 12, 50257, 512),
    ModelSize("355M", 24, 1024, 16, 50257, 512),
    ModelSize("774M", 36, 1280, 20, 50257, 512),
    ModelSize("1.5B", 48, 1600, 25, 50257, 512),
)


def largest_that_fits(free: int) -> int:
    """Return the index in SIZES of the largest model for `free` bytes; 0 always fits."""
    fitting = [i for i, s in enumerate(SIZES) if s.needed + _RESERVE <= MEMORY_SHARE * free]
    return max(fitting, default=0)


class Transformer(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Token and position embeddings, pre-norm blocks with causal attention, shared output."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        shape = size.width, size.heads, 4 * size.width
        block = nn.TransformerEncoderLayer(*shape, 0.0, "gelu", batch_first=True, norm_first=True)
        norm = self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.TransformerEncoder(block, size.layers, norm, enable_nested_tensor=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean loss of predicting each next token; `batch`: (sequences, tokens)."""
        places = torch.arange(batch.shape[1], device=batch.device)
        hidden = self.tokens(batch) + self.positions(places)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=batch.device)
        logits = nn.functional.linear(self.blocks(hidden, mask, is_causal=True), self.tokens.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class NodeCheckTask:
    """One process of the task, with its device and its group.

    Args:
        settings: the sizes and numbers of what is measured.
        rank: of this process in the group.
        places: of every rank.
        lock: held while something is timed: processes on one machine would slow each other.
        shared: whether this process's machine has other hosts.
    """

    def __init__(
        self, settings: TaskSettings, rank: int, places: list[Place], *, lock: Locks, shared: bool
    ) -> None:
        self.settings, self.rank, self.places = settings, rank, places
        self.device = use_device()
        # Several devices of one machine are measured at the same time: each has its own work.
        on_cpu = self.device.type == "cpu"
        self._machines = tuple(place.machine for place in places) if on_cpu else ()
        self._lock = lock
        self._settle = (
            (lambda: None) if on_cpu else partial(torch.accelerator.synchronize, self.device)
        )
        # On a machine of its own, time lost to other programs counts: nothing is subtracted.
        subtract = shared and on_cpu
        self._thread_account = cpu_of_thread() if subtract else CpuTime
        self._account = cpu_of_process() if subtract else CpuTime

    def measure(self) -> TaskResult:
        """Measure everything that the settings ask for, each thing by itself."""
        settings = self.settings
        step = parameters = bandwidth = latency = model = None
        if settings.model:
            size = SIZES[self._common_size()]
            parameters = size.parameters
        products, timing = self._products()
        timings = [timing]
        if settings.model:
            torch.manual_seed(0)
            model = Transformer(size).to(self.device)
            batch = torch.randint(size.vocabulary, (size.batch, size.tokens), device=self.device)
            account = self._thread_account
            timings.append(repeated(lambda: model(batch).backward(), self._settle, account))
        own_machine = self._machines[self.rank : self.rank + 1]
        seconds = best_of(timings, partial(self._lock, own_machine))
        compute = settings.products * seconds[0]
        if model is not None:
            step = seconds[1]
            compute += settings.model_steps * step
        if not all(bool(torch.isfinite(product()).all()) for product in products):
            raise ArithmeticError("the matrix products are not finite: broken memory or device")
        with self._all_locks():
            if model is not None and len(self.places) > 1:
                step = self._step(model, batch)
            network, linked = self._exchange()
            if (settings.performance or settings.model) and len(self.places) > 1:
                bandwidth, latency = self._all_reduce()
        return TaskResult(compute, network, linked, bandwidth, latency, step, parameters)

    @contextlib.contextmanager
    def _all_locks(self) -> Iterator[None]:
        """Hold the locks of all machines of the group; rank 0 takes them for all ranks.

        It takes them once all ranks are here: a rank that still computes needs its machine's lock.
        """
        dist.barrier()
        with self._lock(self._machines if self.rank == 0 else ()):
            dist.barrier()
            yield

    # ---- computing -----------------------------------------------------------------------

    def _products(self) -> tuple[list[Callable[[], Tensor]], Timing]:
        """Return matrix products, one for the device or one for each usable processor."""
        on_cpu = self.device.type == "cpu"
        own = _MATRIX_ROWS if self.device.type == "cpu" else _MATRIX_ROWS_OF_A_DEVICE
        rows = self.settings.matrix or own
        count = len(os.sched_getaffinity(0)) if on_cpu else 1
        factors = [torch.rand(2, rows, rows, device=self.device) for _ in range(count)]
        products: list[Callable[[], Tensor]] = [partial(torch.matmul, *pair) for pair in factors]
        if not on_cpu:
            return products, repeated(products[0], self._settle)
        torch.set_num_threads(1)  # of each product; there is one for each processor
        return products, in_threads(products, self._thread_account)

    def _step(self, model: Transformer, batch: Tensor) -> float:
        """Return the seconds of a pass with the gradients' all-reduce."""
        model.zero_grad(set_to_none=True)
        # The gradients live in the buckets that are exchanged: half the memory.
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return self._seconds(lambda: wrapped(batch).backward())

    def _common_size(self) -> int:
        """Return the index of the largest model that every process has room for."""
        if self.device.type == "cpu":
            return 0
        free, _ = torch.get_device_module(self.device).mem_get_info(self.device)
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
            if self.places[self.rank].node in pair:
                stacks = {self.places[rank].stack for rank in ranks}
                within_stack = len(stacks) == 1 and "" not in stacks
                own.append((within_stack, self._gather(group, len(ranks))))
        within_stack, seconds = min(own, default=(False, 0.0))
        return seconds, not within_stack

    def _gather(self, group: object, size: int) -> float:
        """Return the seconds of the exchanges of one pair, each as fast as the best one."""
        given = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        taken = [torch.empty_like(given) for _ in range(size)]

        def reduce(times: Sequence[float], operation: object) -> list[float]:
            numbers = torch.tensor(times, dtype=torch.float64, device=self.device)
            dist.all_reduce(numbers, operation, group=group)
            return [float(number) for number in numbers.tolist()]

        exchange = partial(dist.all_gather, taken, given, group=group)
        seconds = together(exchange, self._settle, reduce, self._account)
        if any(float(part[-1]) != 1.0 for part in taken):
            raise ArithmeticError("the exchange brought other numbers than were sent")
        return self.settings.exchanges * seconds

    def _all_reduce(self) -> tuple[float, float]:
        """Return bytes a second of the payload, and the seconds of the smallest all-reduce."""
        large = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        small = torch.ones(1, device=self.device)
        seconds = self._seconds(partial(self._sum, large), _BANDWIDTH_CALLS)
        latency = self._seconds(partial(self._sum, small), _LATENCY_CALLS)
        return large.numel() * large.element_size() / seconds, latency

    def _sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor.div_(len(self.places))

    def _seconds(self, work: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds a call of `work` with all ranks, including the device's queue."""
        work()
        dist.barrier()
        self._settle()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self._settle()
        return max(time.perf_counter() - began, 1e-9) / calls


def use_device() -> torch.device:
    """Select the device of our slot and return it; several processes may share the last one."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    slot = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind.type, min(slot, torch.accelerator.device_count() - 1))
    torch.get_device_module(kind).set_device(device)
    return device
