"""`hvd.elastic.TorchState`, handlers and the sampler, in a world of one."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

import elastic_driver.horovod.torch as hvd
from elastic_driver import contract
from elastic_driver.horovod.common.elastic import kept_of
from elastic_driver.horovod.common.exceptions import NotInYetError
from elastic_driver.horovod.torch.elastic import state as states
from elastic_driver.words.world import SlotInfo
from elastic_driver.worker import current

pytestmark = pytest.mark.usefixtures("world")


def place(rank: int, size: int) -> None:
    current.enter(SlotInfo("localhost", rank, rank, rank, 0, size, size, 1, 0, 1), 1)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    return model, optimizer, step


def content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    of_optimizer = optimizer.state_dict()["state"].values()
    found = [*model.state_dict().values(), *(t for each in of_optimizer for t in each.values())]
    return [tensor.clone() for tensor in found]


def test_restore_brings_back_the_last_commit_with_all_tensors() -> None:
    model, optimizer, step = trained()
    state = hvd.elastic.TorchState(model, optimizer, batch=0, seen=[1])
    state.sync()
    for number in range(1, 8):
        step()
        state.batch = number
        state.seen.append(number)
        if number % 3 == 0:
            state.commit()
            kept, rate = content(model, optimizer), optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 7.0
    for _ in range(2):  # the copies are used again, and stay as they are
        state.restore()
        assert all(map(torch.equal, content(model, optimizer), kept))
        assert (state.batch, state.seen) == (6, [1, 1, 2, 3, 4, 5, 6])
        assert optimizer.param_groups[0]["lr"] == rate
        step()


def test_restore_before_the_first_commit_brings_back_the_beginning() -> None:
    model, optimizer, step = trained()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    step()
    state.batch = 1
    state.restore()
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert state.batch == 0


def test_a_scheduler_of_the_first_optimizer_sets_the_rates_after_a_restore() -> None:
    model = torch.nn.Linear(4, 4)
    first = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(first, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler)
    for expected in (0.05, 0.025):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch looks for a step of the first optimizer
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        state.commit()
        state.restore()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_restore_amid_a_backward_pass_forgets_the_reductions() -> None:
    model, optimizer, step = trained()
    state = hvd.elastic.TorchState(model, optimizer)
    step()
    state.commit()
    model(torch.randn(8, 4)).sum().backward()
    state.restore()
    step()


def test_without_snapshots_a_commit_copies_no_parameter() -> None:
    model, optimizer, step = trained()
    state = hvd.elastic.TorchState(model, optimizer, snapshot=False)
    state.sync()
    state.commit()
    assert kept_of(state).clean
    step()
    assert not kept_of(state).clean
    state.commit()
    assert kept_of(state).clean


def test_attributes_are_copied() -> None:
    values = {"losses": [1.0]}
    state = hvd.elastic.ObjectState(values=values)
    values["losses"].append(2.0)
    state.restore()
    assert state.values == {"losses": [1.0]}


class Vocabulary:
    def __init__(self, *words: str) -> None:
        self.words = list(words)


class VocabularyHandler(states.StateHandler):
    kept: list[str]
    synced = 0

    def save(self) -> None:
        self.kept = list(self.value.words)

    def restore(self) -> None:
        self.value.words = list(self.kept)

    def sync(self) -> None:
        self.synced += 1


def test_a_handler_of_the_script_keeps_its_type() -> None:
    made: list[VocabularyHandler] = []

    def make(value: Vocabulary) -> VocabularyHandler:
        made.append(VocabularyHandler(value))
        return made[-1]

    before = states.get_handler_registry()
    states.set_handler_registry([(Vocabulary, make), *before])
    try:
        state = hvd.elastic.TorchState(words=Vocabulary("a"), epoch=0)
    finally:
        states.set_handler_registry(before)
    state.words.words.append("b")
    state.restore()
    assert state.words.words == ["a"]
    state.words = Vocabulary("c")
    state.words.words.append("d")
    state.sync()
    state.words.words.clear()
    state.restore()
    assert state.words.words == ["c", "d"]
    assert [handler.synced for handler in made] == [1]


def test_the_reset_callbacks_and_reset_are_called() -> None:
    class Own(hvd.elastic.TorchState):
        def reset(self) -> None:
            called.append("reset")

    called: list[str] = []
    state = Own(epoch=1)
    state.register_reset_callbacks([lambda: called.append("one"), lambda: called.append("two")])
    state.on_reset()
    assert called == ["reset", "one", "two"]


def test_the_sampler_shares_the_rest_of_an_epoch_among_the_ranks() -> None:
    data = list(range(23))
    place(0, 2)
    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    whole = list(sampler.remaining_indices)
    assert sorted(whole) == data
    assert (sampler.num_replicas, len(sampler), sampler.total_size) == (2, 12, 24)
    for batch in range(2):
        sampler.record_batch(batch, 3)
    assert sampler.processed_num == 12
    kept = copy.deepcopy(sampler.state_dict())
    shares = []
    for rank in range(3):
        place(rank, 3)
        other = hvd.elastic.ElasticSampler(data, seed=3)
        other.load_state_dict(kept)
        assert other.remaining_indices == whole[12:]
        shares.append(list(other))
    assert [len(share) for share in shares] == [4, 4, 4]
    assert {index for share in shares for index in share} == set(whole[12:])
    shares = []
    for rank in range(4):
        place(rank, 4)
        other.load_state_dict({"epoch": 0, "processed_num": 23})
        shares.append(list(other))
    assert shares == [whole[23:]] * 4, "the last sample is repeated for every rank"
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert sampler.remaining_indices != whole


def test_a_sampler_that_is_made_before_init_under_elasticrun_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hvd.shutdown()
    assert hvd.elastic.ElasticSampler(range(24)).num_replicas == 1
    monkeypatch.setenv(contract.WORKER_ID, "h.0.0")
    with pytest.raises(NotInYetError, match=r"call hvd\.init\(\) first"):
        hvd.elastic.ElasticSampler(range(24))


def test_a_committed_sampler_is_shared_anew_by_sync() -> None:
    sampler = hvd.elastic.ElasticSampler(range(16), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    state.restore()
    assert sampler.processed_num == 4
    state.sync()
    assert len(sampler) == 12
    batches = [batch.tolist() for batch in DataLoader(range(16), batch_size=4, sampler=sampler)]
    assert batches == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_snapshot_takes_less_than_a_deep_copy() -> None:
    # A process of its own: memory that other tests left behind makes a deep copy quicker.
    ran = subprocess.run(
        [sys.executable, "-m", "tests.horovod.jobs.snapshot_time"],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    of_commit, of_copy = json.loads(ran.stdout)
    assert of_commit < 0.6 * of_copy, (of_commit, of_copy)


def test_an_operation_that_nobody_waits_for_goes_with_its_world() -> None:
    tensor = torch.ones(3)
    seen, handle = weakref.ref(tensor), hvd.allreduce_async_(tensor, name="x")
    del tensor
    hvd.shutdown()
    gc.collect()
    assert seen() is None
    with pytest.raises(ValueError, match="its world has ended"):
        hvd.synchronize(handle)
