"""The same training on 8, 4, 3, 2 and 1 real processes: equal, and in exact mode bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.core.batch import allocate_weighted
from elastic_driver.worker.batches import FixedBatch
from tests.support.gloo import run_ranks

VIRTUAL_WORKERS = 8
STEPS = 5


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with a random augmentation."""

    def __init__(self, samples: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, 6, generator=generator)
        self.labels = torch.randint(0, 3, (samples,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + self.noise * torch.randn(6), self.labels[index]


class Network(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
        )
        self.unused = nn.Linear(2, 2)  # no micro-batch ever reaches it
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 1 / 3]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Training:
    """A model, its optimizer and its batches, as a script has them."""

    def __init__(self, exact: bool, samples: int = 8 * 4 * STEPS, **options: Any) -> None:
        torch.manual_seed(3)
        noisy = 1.0 if exact else 0.0
        self.model = Network(dropout=0.5 * noisy)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.batches = FixedBatch(
            Noisy(samples, noisy),
            4,
            model=self.model,
            deterministic=exact,
            **{"virtual_workers": VIRTUAL_WORKERS, **options},
        )

    def steps(self) -> Iterator[int]:
        for step in self.batches:
            for inputs, labels in step:
                nn.functional.cross_entropy(self.model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.batches.advance()
            yield step.number

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "batches": self.batches.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, saved in state.items():
            getattr(self, name).load_state_dict(saved)

    def tensors(self) -> list[Tensor]:
        found = list(self.model.state_dict().values())
        for values in self.optimizer.state_dict()["state"].values():
            found.extend(values[name] for name in sorted(values))
        return found

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.tensors():
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def train(rank: int, size: int, exact: bool, options: dict[str, Any]) -> tuple[str, list[Tensor]]:
    training = Training(exact, **options)
    done = list(training.steps())
    assert done == list(range(len(training.batches)))
    return training.digest(), [tensor.clone().numpy() for tensor in training.tensors()]


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (8 * 4 * STEPS, (8, 4, 3, 2, 1)),
        (8 * 4 * STEPS - 3, (3, 1)),  # a last step with micro-batches of 4 and 3
        (8 * 4 * (STEPS - 1) + 5, (3, 1)),  # one in which only two virtual workers have samples
    ],
)
def test_exact_mode_gives_the_same_bits_for_every_number_of_workers(
    tmp_path: Path, samples: int, sizes: tuple[int, ...]
) -> None:
    digests = {
        size: [digest for digest, _ in run_ranks(size, train, tmp_path, True, {"samples": samples})]
        for size in sizes
    }
    expected = digests[1][0]
    assert digests == {size: [expected] * size for size in sizes}


def test_plain_mode_differs_by_rounding_only_for_every_number_of_workers(tmp_path: Path) -> None:
    options = {"samples": 8 * 4 * STEPS - 3}
    results = {size: run_ranks(size, train, tmp_path, False, options) for size in (8, 4, 3, 2, 1)}
    _, expected = results[1][0]
    for ranks in results.values():
        assert len({digest for digest, _ in ranks}) == 1, "the ranks differ among each other"
        for tensor, wanted in zip(ranks[0][1], expected, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(tensor), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5
            )


def weighted(virtual_workers: int, workers: int) -> list[int]:
    return allocate_weighted(virtual_workers, [1.0 + rank for rank in range(workers)])


@pytest.mark.parametrize("exact", [True, False])
def test_a_worker_without_micro_batches_takes_part_and_holds_nobody_up(
    tmp_path: Path, exact: bool
) -> None:
    options = {"samples": 40, "virtual_workers": 2}
    (expected, _), *_ = run_ranks(1, train, tmp_path, exact, options)
    digests = [digest for digest, _ in run_ranks(3, train, tmp_path, exact, options)]
    assert len(set(digests)) == 1
    assert not exact or digests[0] == expected


def test_neither_loader_processes_nor_shares_by_speed_change_a_bit(tmp_path: Path) -> None:
    samples = {"samples": 8 * 4 * 2}
    (expected, _), *_ = run_ranks(1, train, tmp_path, True, samples)
    for options in ({"num_workers": 2}, {"shares": weighted}):
        ranks = run_ranks(2, train, tmp_path, True, {**samples, **options})
        assert [digest for digest, _ in ranks] == [expected] * 2


def train_through(rank: int, size: int, worlds: list[tuple[int, int]]) -> str:
    """Train in worlds of changing size; whoever comes (back) in receives rank 0's state."""
    training = Training(exact=True)
    for members, steps in worlds:
        group = dist.new_group(list(range(members)))
        if rank < members:
            states = [training.state()]
            dist.broadcast_object_list(states, src=0, group=group)
            training.load(states[0])
            with world_of(group, rank, members):
                for _ in islice(training.steps(), steps):
                    pass
        dist.barrier()
    return training.digest() if rank == 0 else ""


@contextmanager
def world_of(group: dist.ProcessGroup, rank: int, members: int) -> Iterator[None]:
    """Make `group` the world, as a rejoin does."""
    whole, dist.group.WORLD = dist.group.WORLD, group
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (rank, members)
        yield
    finally:
        dist.group.WORLD = whole


def test_exact_mode_gives_the_same_bits_for_every_history(tmp_path: Path) -> None:
    (expected, _), *_ = run_ranks(1, train, tmp_path, True, {})
    for worlds in ([(3, 2), (1, 1), (4, 9)], [(4, 1), (2, 1), (3, 1), (1, 9)]):
        digest, *_ = run_ranks(4, train_through, tmp_path, worlds)
        assert digest == expected, worlds
