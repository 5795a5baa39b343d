"""The floor: the least work after a loss for a system that keeps the survivors' processes.

A parent that has imported torch forks workers, which train over bare gloo groups. The kernel tells
the parent of a worker's end at once; it publishes the members of the next epoch at a TCPStore and
forks a replacement. The survivors, whose collective has failed, connect to each other anew and
repeat the step: they keep the weights that they have, and none is sent. When the replacement is
there, all leave after a common step and connect once more, and it receives the weights.

What stays out is what a real system needs besides: hosts, an agent between the workers and those
who decide, ranks and their rules, a vote about whose state is the newest, a step that only some
have finished, DistributedDataParallel (gradients are summed as one flat tensor), tokens, a log.

    python benchmarks/peers/floor.py RECORDS_DIR WORKERS STEP_MS

It runs until SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

TIMEOUT = timedelta(seconds=30)


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the training script's model: 1 M parameters and SGD."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1000), torch.nn.Tanh()
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def warm_up() -> None:
    """Make one step in the parent, so that no child pays for torch's lazy imports."""
    torch.set_num_threads(1)
    model, optimizer = make_model()
    model(torch.zeros(2, 64)).sum().backward()
    optimizer.step()


def connect(store: dist.Store, epoch: int, rank: int, size: int) -> ProcessGroupGloo:
    """Return a gloo group on loopback, once all members are connected."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(dist.PrefixStore(f"e{epoch}", store), rank, size, options)


class Worker:
    """One worker of the floor."""

    def __init__(self, name: int, port: int, records: Path, step_s: float) -> None:
        self.name, self.step_s = name, step_s
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        self.model, self.optimizer = make_model()
        self.parameters = list(self.model.parameters())
        # The gradients, and in the last place the number of ranks that want to leave the epoch.
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters) + 1)
        self.step = 0
        self.store.set(f"ready/{name}", "")
        self.file = (records / f"{os.getpid()}.jsonl").open("a")

    def run(self, epoch: int) -> None:
        """Train for ever: join the epoch, and go on to the next one after a loss or a growth."""
        fresh = True  # this worker has no weights yet
        while True:
            group = None  # closes our connections: a peer may wait for us in a collective
            members, newcomer = json.loads(self.store.get(f"members/{epoch}"))
            if self.name in members:
                try:
                    group = connect(self.store, epoch, members.index(self.name), len(members))
                    if newcomer or fresh:
                        self.receive_state(group)
                        fresh = False
                    self.train(group, epoch, len(members))
                except RuntimeError:
                    pass  # a peer is lost
            epoch += 1

    def receive_state(self, group: ProcessGroupGloo) -> None:
        """Give all ranks the weights and the step of rank 0, the oldest."""
        state = torch.cat([*(p.data.flatten() for p in self.parameters), torch.tensor([self.step])])
        group.broadcast([state], dist.BroadcastOptions()).wait()
        start = 0
        for p in self.parameters:
            p.data.copy_(state[start : start + p.numel()].view_as(p))
            start += p.numel()
        self.step = int(state[-1])

    def train(self, group: ProcessGroupGloo, epoch: int, size: int) -> None:
        """Train until a peer is lost (RuntimeError), or the next epoch's members are known."""
        place = {"round": epoch, "size": size, "pid": os.getpid()}
        flat = self.flat
        while True:
            started = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 64)).pow(2).mean().backward()
            torch.cat([p.grad.flatten() for p in self.parameters], out=flat[:-1])
            flat[-1] = float(self.store.check([f"members/{epoch + 1}"]))
            group.allreduce([flat]).wait()
            leave = flat[-1] > 0
            start = 0
            for p in self.parameters:
                p.grad.copy_(flat[start : start + p.numel()].view_as(p)).div_(size)
                start += p.numel()
            time.sleep(max(0.0, self.step_s - (time.perf_counter() - started)))
            self.optimizer.step()
            self.step += 1
            self.file.write(json.dumps({"t": time.time(), "step": self.step, **place}) + "\n")
            self.file.flush()
            if leave:
                return


def main() -> None:
    """Fork workers, and after each death publish the survivors, then the full membership."""
    records, workers, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000
    warm_up()
    reader, writer = os.pipe()
    if os.fork() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    port = int(os.read(reader, 16))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    pids: dict[int, int] = {}

    def start(name: int, epoch: int) -> None:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            Worker(name, port, records, step_s).run(epoch)
            os._exit(0)
        pids[pid] = name

    epoch = 1
    for name in range(workers):
        start(name, epoch)
    members = list(range(workers))
    store.set(f"members/{epoch}", json.dumps([members, True]))
    fresh = workers
    while True:
        pid, _ = os.wait()
        members.remove(pids.pop(pid))
        epoch += 1
        store.set(f"members/{epoch}", json.dumps([members, False]))
        start(fresh, epoch + 1)
        members.append(fresh)
        fresh += 1
        epoch += 1
        store.wait([f"ready/{members[-1]}"])
        store.set(f"members/{epoch}", json.dumps([members, True]))


if __name__ == "__main__":
    os.setpgid(0, 0)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    main()
