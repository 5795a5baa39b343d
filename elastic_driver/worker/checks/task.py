"""The task of a node check: multiply matrices, exchange data with the partner, time both.

An agent starts it as `python -m elastic_driver.worker.checks.task`, one process for each device of
the nodes that are paired. It meets the others through the job's rendezvous, writes one
`TaskResult` and ends. Whatever goes wrong ends it with a traceback and exit status 1; the check
reads both. It never judges. Times are seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import combinations
from urllib.parse import urlsplit

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from elastic_driver import contract
from elastic_driver.core.check_messages import (
    TASK_SETTINGS,
    TaskResult,
    TaskSettings,
    result_key,
)
from elastic_driver.errors import ClusterError
from elastic_driver.worker.checks.model import SIZES, Transformer, largest_that_fits
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.torch_store import HTTPStore

_MATRIX = {"cpu": 384, "cuda": 4096}
_WARM_UP = 2  # what happens first also loads libraries and opens connections
_LATENCY_ROUNDS = 20
_BANDWIDTH_ROUNDS = 5


class Task:
    """One process of the task: its device, its group, what it is to measure."""

    def __init__(self, settings: TaskSettings, node: int, nodes: list[int]) -> None:
        """`node`: the index of this process's node; `nodes`: that of every rank's."""
        self.settings = settings
        self.node, self.nodes = node, nodes
        self.device = _device()

    def measure(self) -> TaskResult:
        """Run everything that is asked for, each thing timed by itself."""
        settings = self.settings
        compute = self._multiply()
        step = parameters = bandwidth = latency = None
        if settings.model:
            passes, step, parameters = self._train()
            compute += passes
        network = self._exchange()
        if (settings.performance or settings.model) and dist.get_world_size() > 1:
            bandwidth, latency = self._all_reduce()
        return TaskResult(compute, network, bandwidth, latency, step, parameters)

    # ---- computing -----------------------------------------------------------------------

    def _multiply(self) -> float:
        rows = self.settings.matrix or _MATRIX[self.device.type]
        left = torch.rand(rows, rows, device=self.device)
        right = torch.rand(rows, rows, device=self.device) / rows
        for _ in range(_WARM_UP):
            left @ right
        with self._timed() as elapsed:
            for _ in range(self.settings.products):
                left = left @ right
        if not bool(torch.isfinite(left).all()):
            raise ArithmeticError("the matrix products are not finite: broken memory or device")
        return elapsed()

    def _train(self) -> tuple[float, float, int]:
        """Seconds of all passes without any exchange, of one step with it; the model's size."""
        size = SIZES[self._common_size()]
        torch.manual_seed(0)
        model = Transformer(size).to(self.device)
        batch = torch.randint(size.vocabulary, (size.batch, size.tokens), device=self.device)
        _passes(model, batch)
        with self._timed() as computing:
            for _ in range(self.settings.model_steps):
                _passes(model, batch)
        model.zero_grad(set_to_none=True)
        step = computing() / self.settings.model_steps
        if dist.get_world_size() > 1:
            # The gradients live in the buckets that are exchanged: half the memory.
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
            _passes(wrapped, batch)
            dist.barrier()
            with self._timed() as stepping:
                _passes(wrapped, batch)
            step = stepping()
        return computing(), step, sum(p.numel() for p in model.parameters())

    def _common_size(self) -> int:
        """The largest model that every process of the group has room for."""
        if self.device.type == "cpu":
            return 0
        free, _ = torch.cuda.mem_get_info(self.device)
        least = torch.tensor([largest_that_fits(free)], device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    # ---- the network ---------------------------------------------------------------------

    def _exchange(self) -> float:
        """The shortest time of an exchange with one other node; 0 where there is none.

        Each pair is timed by itself, so that in a group of three the slow one shows.
        """
        names = sorted(set(self.nodes))
        own = []
        for pair in combinations(names, 2):
            ranks = [rank for rank, node in enumerate(self.nodes) if node in pair]
            group = dist.group.WORLD if len(names) == 2 else dist.new_group(ranks)
            dist.barrier()
            if self.node in pair:
                own.append(self._gather(group, len(ranks)))
        return min(own, default=0.0)

    def _gather(self, group: object, size: int) -> float:
        given = torch.ones(max(1, self.settings.payload // 4), device=self.device)
        taken = [torch.empty_like(given) for _ in range(size)]
        for _ in range(_WARM_UP):
            dist.all_gather(taken, given, group=group)
        with self._timed() as elapsed:
            for _ in range(self.settings.exchanges):
                dist.all_gather(taken, given, group=group)
        if any(float(part[-1]) != 1.0 for part in taken):
            raise ArithmeticError("the exchange brought other numbers than were sent")
        return elapsed()

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


def _choose_interface(endpoint: str) -> None:
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


def main() -> None:
    """Run the task this process was started for."""
    env = os.environ
    worker, endpoint = env[contract.WORKER_ID], env[contract.RENDEZVOUS]
    task, rank, size = int(env[contract.ROUND]), int(env["RANK"]), int(env["WORLD_SIZE"])
    _choose_interface(endpoint)
    with RendezvousClient(endpoint, read_token_file(env[contract.TOKEN_FILE])) as client:
        entry = client.get(TASK_SETTINGS)
        if entry is None:
            raise ClusterError("no node check is going on at this rendezvous")
        settings = msgspec.json.decode(entry.value, type=TaskSettings)
        timeout = timedelta(seconds=settings.timeout)
        store = HTTPStore(client, contract.round_prefix(task) + "torch/", timeout)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            node = int(env["GROUP_RANK"])
            nodes: list[int] = [0] * size
            dist.all_gather_object(nodes, node)
            result = Task(settings, node, nodes).measure()
            client.set(result_key(task, worker), msgspec.json.encode(result))
            dist.barrier()  # nobody leaves while another still needs it
        finally:
            dist.destroy_process_group()
            store.close()


if __name__ == "__main__":
    main()
