"""The steps, samples and numbers of a process, as its heartbeats report them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_driver as elastic
from elastic_driver.errors import UsageError
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.world import session
from elastic_driver.worker.world.member import JobMembership

DATA = TensorDataset(torch.randn(50, 2), torch.randn(50, 1))


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> TrainingProgress:
    """The progress of a process that is in a world, as far as a script can tell."""
    made = JobMembership(None)
    made.progress.enter(1, 0)
    monkeypatch.setattr(session._Session, "membership", made)
    return made.progress


def test_a_step_that_is_reported_and_committed_counts_once(progress: TrainingProgress) -> None:
    for step in (1, 2, 3):
        elastic.report_progress(step=step, samples=10, loss=1.0 / step)
        progress.record_commit(step)
    assert (progress.done.steps, progress.done.samples) == (3, 30)
    assert (progress.reported_steps, len(progress.step_times)) == (3, 3)
    assert progress.numbers == {"loss": pytest.approx(1 / 3)}


def test_numbers_alone_are_no_sign_of_life(progress: TrainingProgress) -> None:
    before = progress.active_at
    elastic.report_progress(total=100, loss=torch.tensor(0.5), accuracy=math.nan)
    assert (progress.active_at, progress.total) == (before, 100)
    assert progress.numbers == {"loss": 0.5}, "what is not finite is left out"


def test_what_is_no_number_is_refused(progress: TrainingProgress) -> None:
    with pytest.raises(UsageError, match=r"report_progress\(loss=…\): give a number, not a str"):
        elastic.report_progress(loss="low")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got 9 numbers; up to 8"):
        elastic.report_progress(**{f"n{i}": 1.0 for i in range(9)})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"samples=-1"):
        elastic.report_progress(samples=-1)
    assert progress.numbers == {}


def state_of(progress: TrainingProgress, **parts: object) -> elastic.TorchState:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = elastic.TorchState(model=model, optimizer=optimizer, **parts)
    state._progress = progress
    state._last.version = 0
    return state


def test_an_elastic_sampler_counts_the_samples_of_commits(progress: TrainingProgress) -> None:
    sampler = elastic.ElasticSampler(DATA)
    state = state_of(progress, sampler=sampler)
    for inputs, labels in DataLoader(DATA, batch_size=8, sampler=sampler):
        state.optimizer.zero_grad()
        (state.model(inputs) - labels).pow(2).mean().backward()
        state.optimizer.step()
        state.commit()
        elastic.report_progress(samples=len(inputs))  # does not count them again
    assert (progress.done.steps, progress.done.samples) == (7, 50)
    times = progress.times
    assert times is not None
    assert times.compute is not None
    assert times.compute > 0.0
    assert times.commit is not None
    assert times.commit > 0.0
    assert times.exchange is not None


def test_a_fixed_batch_counts_the_samples_of_commits_and_its_wait_for_data(
    progress: TrainingProgress,
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = elastic.FixedBatch(DATA, 4, model=model, virtual_workers=3)
    state = elastic.TorchState(model=model, optimizer=optimizer, batches=batches)
    state._progress = progress
    state._last.version = 0
    for step in batches:
        for inputs, labels in step:
            (model(inputs) - labels).pow(2).mean().backward()
        optimizer.step()
        state.commit()
    assert (progress.done.steps, progress.done.samples) == (5, 50)
    assert progress.times is not None
    assert progress.times.data is not None
    assert progress.times.data > 0.0
