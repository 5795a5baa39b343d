"""The order in which a device is left: settle, cut off, wait; and what the others wait for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_driver.errors import WorldBrokenError
from elastic_driver.worker.world import device as device_half
from elastic_driver.worker.world import groups
from elastic_driver.worker.world.device import Accelerator, DeviceHalf
from elastic_driver.worker.world.gloo import CollectiveWaits, GroupConnections
from elastic_driver.worker.world.groups import RoundGroup
from tests.support.gloo import run_ranks


class Stuck:
    """A device whose work ends only when it is aborted, and whose abort ends when it is let."""

    backends = "cuda:none"

    def __init__(self) -> None:
        self.freed, self.let = threading.Event(), threading.Event()
        self.aborts = 0
        self.idle = False  # all streams were waited for
        self.error: Exception | None = None

    def identity(self) -> str:
        return "stuck"

    def begin(self) -> None: ...

    def connect(self) -> None: ...

    def settle(self) -> None:
        assert self.freed.wait(10)

    def synchronize(self) -> None:
        self.settle()
        self.idle = True

    def abort(self) -> None:
        self.aborts += 1
        assert self.let.wait(10)
        if self.error is not None:
            raise self.error
        self.freed.set()

    def forget(self) -> None: ...


def test_a_thread_that_waits_for_its_device_is_freed_by_another_and_knows_why() -> None:
    device = Stuck()
    half = DeviceHalf(device)
    found: list[BaseException] = []

    def train() -> None:
        try:
            half.settle()
        except WorldBrokenError as error:
            found.append(error)

    training = threading.Thread(target=train)
    training.start()
    began = time.monotonic()
    half.cut_off("a.0.1 was killed")
    half.cut_off("and now this")
    assert time.monotonic() - began < 1, "whoever hears of the loss goes on with its heartbeats"
    assert half.reason == "a.0.1 was killed"
    assert training.is_alive()
    device.let.set()
    training.join(10)
    half.wait_until_cut_off()
    assert device.aborts == 1
    assert device.idle
    assert "a.0.1 was killed" in str(found[0])
    assert half.problem() is None


def test_what_was_done_before_the_cut_off_counts() -> None:
    device = Stuck()
    device.freed.set()
    DeviceHalf(device).settle()


def test_after_a_cut_off_nothing_counts_even_if_the_device_has_done_it() -> None:
    device = Stuck()
    device.freed.set()
    half = DeviceHalf(device)
    half.cut_off("a.0.1 was killed")
    with pytest.raises(WorldBrokenError):
        half.settle()
    device.let.set()


def test_a_cut_off_that_takes_for_ever_or_fails_is_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_half, "CUT_OFF_S", 0.05)
    slow, failing = Stuck(), Stuck()
    failing.error = RuntimeError("NCCL timeout\nand where")
    failing.let.set()
    for device, what in (
        (slow, "was not ended within 0.05 s"),
        (failing, "could not be ended: NCCL timeout"),
    ):
        half = DeviceHalf(device)
        assert half.problem() is None
        half.cut_off("a.0.1 was killed")
        half.wait_until_cut_off()
        assert str(half.problem()).endswith(what)
    slow.let.set()


class Slow:
    """A type of device that takes until `opened` to be opened; notes what is asked of it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.calls: list[str] = []

    def set_device(self, device: torch.device) -> None:
        thread = threading.current_thread().name
        self.calls.append(thread)
        if thread == "elastic-open-device":
            assert self.opened.wait(10)
            self.calls.append("opened")
            raise RuntimeError("out of memory")  # the thread that connects meets it, too


def test_a_device_is_opened_on_a_thread_for_which_the_connecting_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow()
    monkeypatch.setattr(torch, "get_device_module", lambda _: slow)
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(eager_connect_single_device=id))
    monkeypatch.setattr(device_half.torch_seams, "default_group", lambda: group)
    device = Accelerator("cuda", "nccl", 0)
    device.open()
    connecting = threading.Thread(target=device.connect, name="connecting")
    connecting.start()
    assert "connecting" not in slow.calls
    slow.opened.set()
    connecting.join(10)
    assert slow.calls == ["elastic-open-device", "opened", "connecting"]


# ---- what a group does for its half ------------------------------------------------------


def votes(rank: int, _size: int, ballots: list[list[str]]) -> list[bool]:
    group = RoundGroup(
        dist.group.WORLD._get_backend(groups.torch.device("cpu")), GroupConnections()
    )
    return [group.vote(ballot[rank]) for ballot in ballots]


def test_devices_take_part_where_everybody_has_one_of_its_own(tmp_path: Path) -> None:
    ballots = [["a/1", "a/2", "b/1"], ["a/1", "", "b/1"], ["a/1", "a/1", "b/1"], ["", "", ""]]
    for found in run_ranks(3, votes, tmp_path, ballots):
        assert found == [True, False, False, False]


def votes_after_a_broken_round(rank: int, _size: int) -> bool:
    left = CollectiveWaits()
    left.give_up("the round before")
    CollectiveWaits.use(left)  # until the next round is entered, and the vote comes before that
    if rank == 1:
        time.sleep(0.5)  # so that the other one has to wait
    try:
        return votes(rank, 2, [["a/1", "a/2"]])[0]
    finally:
        CollectiveWaits.use(None)


def test_the_vote_of_a_new_round_is_not_ended_with_the_waits_of_the_one_before(
    tmp_path: Path,
) -> None:
    assert list(run_ranks(2, votes_after_a_broken_round, tmp_path)) == [True, True]


def lingers(rank: int, _size: int) -> float:
    made = GroupConnections()
    store = dist.FileStore("second", 2)
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    backend = groups.make_gloo(store, rank, 2, device)
    made.finish()
    group = RoundGroup(backend, made)
    took = []
    for absent in (None, 1):
        began = time.monotonic()
        if rank != absent:
            group.linger()
        took.append(time.monotonic() - began)
        dist.barrier()
    return took


def test_a_group_lingers_for_its_peers_but_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (together, alone), _ = run_ranks(2, lingers, tmp_path)
    assert together < groups.LINGER_S
    assert groups.LINGER_S <= alone < groups.LINGER_S + 5


# ---- where no half carries the device's tensors ------------------------------------------


def carries(rank: int, size: int) -> list[object]:
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")  # nothing touches it
    dist.barrier()  # else the other rank may find us gone while it still connects
    dist.destroy_process_group()
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    network = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    def make(store: dist.Store, rank: int, size: int, _: object = None) -> Any:
        return groups.make_gloo(store, rank, size, network)

    store = dist.FileStore("second", size)
    group = RoundGroup(make(store, rank, size), GroupConnections(), store=store)
    group.install(make)
    found: list[object] = []
    for torchs in (dist.group.WORLD, dist.new_group(list(range(size)))):
        assert torchs is not None
        ours = torchs._get_backend(cpu)
        found += [torchs._get_backend(cuda) == ours, type(ours).__name__]
    values: list[object] = [None] * size
    dist.all_gather_object(values, rank)
    dist.barrier()
    group.take_down().join()
    dist.init_process_group("gloo", store=dist.FileStore("third", size), rank=rank, world_size=size)
    return [*found, values]


def test_gloo_carries_the_tensors_of_devices_that_have_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for found in run_ranks(2, carries, tmp_path):
        assert found == [True, "ProcessGroupGloo", True, "ProcessGroupGloo", [0, 1]]


def test_no_thread_of_torch_waits_for_the_driver_when_its_group_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    device = SimpleNamespace(forget=lambda: order.append("the group"))
    group = RoundGroup(None, GroupConnections(), half=DeviceHalf(device))
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups, "_close", lambda _: order.append("the store"))
    group.take_down().join()
    assert order == ["the store", "the group"]
