"""The floor: the least work after a loss, without hosts, policy or an API.

A parent that has imported torch forks workers. They train with DDP over gloo, meeting at a
TCPStore under a prefix for each epoch. When a worker is killed, the parent publishes the next
epoch's members at once and forks a replacement, which joins in the epoch after that. Nothing is
decided, logged, authenticated or journalled: what a real system needs beyond this is overhead.

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
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=30)


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the training script's model: 1 M parameters and Adam."""
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


def worker(name: int, port: int, records: Path, step_s: float, epoch: int) -> None:
    """Train for ever: join the epoch, step, and on an error go on to the next epoch."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    model, optimizer = make_model()
    step = 0
    with (records / f"{os.getpid()}.jsonl").open("a") as file:
        while True:
            members = json.loads(store.get(f"members/{epoch}"))
            if name not in members:
                epoch += 1
                continue
            rank = members.index(name)
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"e{epoch}", store),
                    rank=rank,
                    world_size=len(members),
                    timeout=TIMEOUT,
                )
                step = sync(model, step)
                step = train(model, optimizer, step, epoch, len(members), step_s, file, store)
            except RuntimeError:
                pass
            if dist.is_initialized():
                dist.destroy_process_group()
            epoch += 1


def sync(model: torch.nn.Module, step: int) -> int:
    """Give all ranks the state of rank 0, the oldest."""
    position = torch.tensor([step])
    dist.broadcast(position, 0)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return int(position)


def train(model, optimizer, step, epoch, size, step_s, file, store) -> int:
    """Train until a peer is lost (RuntimeError) or a newcomer waits at an agreed step."""
    ddp = DistributedDataParallel(model)
    leave = torch.zeros(1)
    while True:
        started = time.perf_counter()
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).pow(2).mean().backward()
        time.sleep(max(0.0, step_s - (time.perf_counter() - started)))
        optimizer.step()
        step += 1
        line = {"t": time.time(), "step": step, "round": epoch, "size": size, "pid": os.getpid()}
        file.write(json.dumps(line) + "\n")
        file.flush()
        leave[0] = float(store.check([f"members/{epoch + 1}"]))
        dist.all_reduce(leave)
        if leave[0] > 0:
            return step


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
            worker(name, port, records, step_s, epoch)
            os._exit(0)
        pids[pid] = name

    epoch = 1
    for name in range(workers):
        start(name, epoch)
    members = list(range(workers))
    store.set(f"members/{epoch}", json.dumps(members))
    fresh = workers
    while True:
        pid, _ = os.wait()
        members.remove(pids.pop(pid))
        epoch += 1
        store.set(f"members/{epoch}", json.dumps(members))
        start(fresh, epoch + 1)
        members.append(fresh)
        fresh += 1
        epoch += 1
        store.set(f"members/{epoch}", json.dumps(members))


if __name__ == "__main__":
    os.setpgid(0, 0)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    main()
