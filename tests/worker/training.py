"""What the workers of these tests run: real, small, deterministic trainings.

Each writes down every finished step with a digest of all its state, so that ranks and histories
can be compared.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import elastic_driver as elastic
from elastic_driver.worker.world import session
from tests.support.coordinator import Recorder

LARGE = 64 * 2**20  # numbers of a tensor that takes far longer than 0.03 s to send


class Stops(Exception):
    """Raised by a script on purpose."""


def digest(*things: Any) -> str:
    """A hash of every tensor and value in these."""
    found = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            found.update(thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                found.update(str(key).encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            for item in thing:
                add(item)
        elif hasattr(thing, "state_dict"):  # else it would be the name of its class
            add(thing.state_dict())
        else:
            found.update(repr(thing).encode())

    for thing in things:
        add(thing)
    return found.hexdigest()[:16]


def random_digest() -> str:
    """A hash of the generators' states, without moving them."""
    return digest(torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())


class Everything:
    """A model with buffers, Adam, a schedule and a counter, under a TorchState."""

    def __init__(self, width: int = 32, **more: Any) -> None:
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))  # models differ until they are synced
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.9)
        self.state = elastic.TorchState(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            step=0,
            trail=[],
            **more,
        )

    def digest(self) -> str:
        state = self.state
        return digest(
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.schedule.state_dict(),
            state.step,
            state.trail[-5:],
        )

    def train_a_step(self, ddp: nn.Module) -> None:
        state = self.state
        generator = torch.Generator().manual_seed(state.step)
        x = torch.randn(4, 8, generator=generator)
        loss = (ddp(x) - x.sum(1, keepdim=True)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        state.step += 1
        state.trail.append(state.step)

    def note(self, record: Recorder) -> None:
        record.note(
            step=self.state.step,
            version=self.state.version,
            round=elastic.round_id(),
            rank=elastic.rank(),
            size=elastic.size(),
            digest=self.digest(),
            trail=len(self.state.trail),
            random=random_digest(),
        )


def steps(path: str, count: int, pause: float = 0.01) -> None:
    """Train `count` steps and write each down after its commit."""
    job, record = Everything(), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        while state.step < count:
            job.train_a_step(ddp)
            try:
                state.commit()
            finally:
                job.note(record)
            time.sleep(pause)

    train(job.state)


def steps_with_checkpoints(path: str, folder: str) -> None:
    """Train for ever, with a folder for checkpoints in which none is due."""
    job, record = Everything(checkpoint_dir=folder, every=10**6), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        while True:
            job.train_a_step(ddp)
            try:
                state.commit()
            finally:
                job.note(record)
            time.sleep(0.01)

    train(job.state)


def fails_at(path: str, step: int) -> None:
    """A script with a bug of its own."""
    job, record = Everything(), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        while True:
            job.train_a_step(ddp)
            state.commit()
            job.note(record)
            if state.step == step and elastic.rank() == 1:
                raise Stops("a mistake of the script")

    train(job.state)


def resumes_for_ever(path: str) -> None:
    """Note each entry into the training function; leave by notices only."""
    job, record = Everything(width=8), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        record.note(entered=elastic.round_id(), step=state.step, round=elastic.round_id())
        while True:
            job.train_a_step(ddp)
            state.commit()

    train(job.state)


def ends_callbacks_late(path: str) -> None:
    """As `resumes_for_ever`; gloo's threads are slow to end what they do for a gradient."""
    set_result = torch.futures.Future.set_result

    def late(future: Any, value: Any) -> None:
        set_result(future, value)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)  # the training thread goes on, and may leave the world

    torch.futures.Future.set_result = late  # type: ignore[method-assign]
    resumes_for_ever(path)


def has_a_hook_that_holds_the_group(path: str) -> None:
    """A communication hook of the script's own; gloo's threads are slow to forget it."""
    job, record = Everything(width=8), Recorder(path)

    class Kept:
        def __init__(self, group: Any) -> None:
            self.group = group

        def __del__(self) -> None:
            time.sleep(0.2)  # on gloo's thread; then its reference to the group goes

    def hook(_state: object, bucket: Any) -> Any:
        kept = Kept(dist.group.WORLD)
        work = dist.all_reduce(bucket.buffer(), group=kept.group, async_op=True)
        return work.get_future().then(lambda future, _kept=kept: future.value()[0])

    hook.__annotations__.clear()  # torch compares them with types, and here they are strings

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        ddp.register_comm_hook(None, hook)
        record.note(entered=elastic.round_id())
        while True:
            job.train_a_step(ddp)
            state.commit()

    train(job.state)


def dies_while_joining(path: str) -> None:
    """A member that is READY, is given a place, and dies before it connects."""
    from elastic_driver.words.world import StateVersion
    from elastic_driver.worker import context
    from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
    from elastic_driver.worker.heartbeat.training_progress import TrainingProgress

    born = context.from_environment()
    assert born is not None
    connection = DriverConnection(born, TrainingProgress(), lambda _: None, lambda: None)
    connection.start()
    connection.report_ready(0, StateVersion(), "started", bound=False)
    connection.await_world(0)
    Recorder(path).note(dying=True)
    os._exit(9)


def dies_amid_a_broadcast(path: str) -> None:
    """In round 1 rank 0 dies while the others receive a large message from it."""
    job, record = Everything(width=8), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        if elastic.round_id() == 1:
            job.train_a_step(ddp)
            state.commit()
            message = torch.zeros(LARGE)
            dist.barrier()
            if elastic.rank() == 0:
                threading.Timer(0.03, os._exit, args=(9,)).start()
            dist.broadcast(message, 0)
        while True:
            job.train_a_step(ddp)
            state.commit()
            job.note(record)

    train(job.state)


def means_gradients(path: str) -> None:
    """Note the bits of gradients under torch's own wrapper, under ours, and with a hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    session.init()
    record, found = Recorder(path), {}
    for kind in ("torch", "ours", "hook"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(50, 7, sparse=True), nn.Linear(7, 5))
        wrap = nn.parallel.DistributedDataParallel if kind == "torch" else elastic.wrap
        ddp = wrap(model)
        if kind == "hook":
            ddp.register_comm_hook(None, allreduce_hook)
        torch.manual_seed(elastic.rank())
        ddp(torch.randint(50, (6,))).pow(3).sum().backward()
        found[kind] = [p.grad.to_dense().clone() for p in model.parameters()]
    close = all(map(torch.allclose, found["hook"], found["torch"]))
    record.note(torch=digest(found["torch"]), ours=digest(found["ours"]), hook_is_close=close)
    session.shutdown()


def uses_torch_directly(path: str) -> None:
    """Collectives of every kind on the group that `init()` made."""
    import torch.distributed as dist

    elastic.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    checks = {
        "backend": dist.get_backend(),
        "same": (rank, size) == (elastic.rank(), elastic.size()),
        # torch's own adds a prefix a round
        "excepthook": sys.excepthook.__module__.startswith("elastic_driver."),
    }
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16):
        values = torch.ones(4).to(dtype)
        dist.all_reduce(values)
        checks[str(dtype)] = bool((values == size).all())
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    checks["objects"] = gathered == [{"rank": r} for r in range(size)]
    part = dist.new_group([0, 1])
    if rank < 2:
        values = torch.ones(1)
        dist.all_reduce(values, group=part)
        checks["part"] = int(values) == 2
    dist.barrier()
    work = dist.broadcast(torch.zeros(1), 0, async_op=True)
    work.wait()
    Recorder(path).note(checks=checks)
    assert session.membership() is not None


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose samples say whether the process that read them held on to the group."""

    def __len__(self) -> int:
        return 100000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.tensor([os.getpid(), int(session.membership() is not None)])


def trains_fixed_batches(path: str) -> None:
    """The same steps with the bare model and with the wrapped one, by ranks of unequal shares."""

    def train(*, wrapped: bool) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        batches = elastic.FixedBatch(
            torch.randn(18, 3), 2, model=model, virtual_workers=3, deterministic=True
        )
        optimizer = torch.optim.Adam(model.parameters())
        called = elastic.wrap(model) if wrapped else model
        for step in batches:
            for inputs in step:
                called(inputs).square().mean().backward()
            optimizer.step()
        return digest(model.state_dict(), optimizer.state_dict())

    elastic.init()
    Recorder(path).note(wrapped=train(wrapped=True), bare=train(wrapped=False))


def loads_data_in_children(path: str) -> None:
    """Train with two loader processes, forked while the group stands."""
    job, record = Everything(), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        ddp = elastic.wrap(state.model)
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        for batch in loader:
            job.train_a_step(ddp)
            state.commit()
            record.note(
                step=state.step,
                round=elastic.round_id(),
                children=sorted(set(batch[:, 0].tolist()) - {os.getpid()}),
                connected=bool(batch[:, 1].any()),
            )

    train(job.state)


def disagrees(path: str) -> None:
    """Raise what a broken group raises, in every round, before any step."""
    job, record = Everything(width=8), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        record.note(step=state.step, round=elastic.round_id())
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer, always")

    train(job.state)
