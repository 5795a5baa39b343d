"""The same training on 8, 4, 3, 2 and 1 real processes: equal, and in exact mode bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.features.stragglers.balance import Cost, fastest_shares
from elastic_driver.words.orders import Allocation
from elastic_driver.worker.batches import BalancedShares, FixedBatch
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
        self.rare = nn.Linear(6, 3)  # about every second one does
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 1 / 3]))

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.layers(inputs)
        return found + self.rare(inputs) if inputs[0, 0] > 0 else found


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


def weighted(virtual_workers: int, workers: int) -> list[int]:
    return fastest_shares(virtual_workers, [Cost(1.0 / (1 + rank)) for rank in range(workers)])


class Case(NamedTuple):
    """One training, repeated in worlds of several sizes."""

    sizes: tuple[int, ...]
    exact: bool
    options: dict[str, Any]


FULL = {"samples": 8 * 4 * STEPS}
SHORT = {"samples": 8 * 4 * STEPS - 3}  # a last step with micro-batches of 4 and 3
TINY = {"samples": 8 * 4 * (STEPS - 1) + 5}  # one in which two virtual workers have samples
FEW = {"samples": 40, "virtual_workers": 2}
TWO_STEPS = {"samples": 8 * 4 * 2}
CASES = {
    "plain": Case((8, 4, 3, 2, 1), False, SHORT),
    "plain standby": Case((3, 1), False, FEW),
    "full": Case((8, 4, 3, 2, 1), True, FULL),
    "short": Case((3, 1), True, SHORT),
    "tiny": Case((3, 1), True, TINY),
    "standby": Case((3, 1), True, FEW),
    "two steps": Case((1,), True, TWO_STEPS),
    "loaders": Case((2,), True, {**TWO_STEPS, "num_workers": 2}),
    "by speed": Case((2,), True, {**TWO_STEPS, "shares": weighted}),
    "balanced": Case((4, 3, 2), True, {**FULL, "balance": True}),
}
HISTORIES = ([(3, 2), (1, 1), (4, 9)], [(4, 1), (2, 1), (3, 1), (1, 9)])
Trained = tuple[str, list[Any]]  # digest, tensors as arrays


def train_all(rank: int, _size: int) -> tuple[dict[tuple[str, int], Trained], list[str]]:
    """Every case and every history, by as many of the ranks as each needs."""
    groups = {size: dist.new_group(list(range(size))) for size in (8, 4, 3, 2, 1)}
    found = {}
    for name, case in CASES.items():
        for members in case.sizes:
            if rank < members:
                with world_of(groups[members], rank, members):
                    found[name, members] = train(case.exact, case.options)
    return found, [train_through(rank, worlds, groups) for worlds in HISTORIES]


class Gifts:
    """A driver that changes its mind as often as it is asked, and says nonsense in between."""

    def __init__(self) -> None:
        self.given = 0

    def newest(self) -> Allocation:
        self.given += 1
        size = dist.get_world_size()
        nonsense = [(8,), (9, *[0] * (size - 1)), (-1, 9, *[0] * (size - 2)), ()]
        if self.given % 3 == 0:
            return Allocation(0, nonsense[self.given % 4], "nonsense")
        dice = random.Random(self.given)
        cuts = sorted(dice.randint(0, VIRTUAL_WORKERS) for _ in range(size - 1))
        edges = [0, *cuts, VIRTUAL_WORKERS]
        return Allocation(0, tuple(b - a for a, b in pairwise(edges)), "a whim")


def train(exact: bool, options: dict[str, Any]) -> Trained:
    training = Training(exact, **options)
    gifts = Gifts() if options.get("balance") else None
    if gifts is not None:
        training.batches.balanced_shares = BalancedShares(gifts.newest, every=1)
    done = list(training.steps())
    assert done == list(range(len(training.batches)))
    if gifts is not None:
        assert gifts.given > 1 or dist.get_rank() > 0, "shares have changed in mid-epoch"
    return training.digest(), [tensor.clone().numpy() for tensor in training.tensors()]


def train_through(
    rank: int, worlds: list[tuple[int, int]], groups: dict[int, dist.ProcessGroup]
) -> str:
    """Train in worlds of changing size; whoever comes (back) in receives rank 0's state."""
    training = Training(exact=True)
    for members, steps in worlds:
        group = groups[members]
        if rank < members:
            states = [training.state()]
            dist.broadcast_object_list(states, src=0, group=group)
            training.load(states[0])
            with world_of(group, rank, members):
                for _ in islice(training.steps(), steps):
                    pass
    return training.digest()


@contextmanager
def world_of(group: dist.ProcessGroup, rank: int, members: int) -> Iterator[None]:
    """Make `group` the world, as a rejoin does."""
    whole, dist.group.WORLD = dist.group.WORLD, group
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (rank, members)
        yield
    finally:
        dist.group.WORLD = whole


class Results:
    """The results of eight ranks, in one go: starting processes takes longer than the training."""

    def __init__(self, ranks: list[tuple[dict[tuple[str, int], Trained], list[str]]]) -> None:
        self._found = [found for found, _ in ranks]
        self.histories = ranks[0][1]

    def ranks(self, name: str, size: int) -> list[Trained]:
        return [self._found[rank][name, size] for rank in range(size)]

    def digests(self, name: str) -> dict[int, list[str]]:
        """By world size, of each rank."""
        return {n: [digest for digest, _ in self.ranks(name, n)] for n in CASES[name].sizes}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(run_ranks(8, train_all, tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", ["full", "short", "tiny", "standby"])
def test_exact_mode_gives_the_same_bits_for_every_number_of_workers(
    results: Results, name: str
) -> None:
    digests = results.digests(name)
    expected = digests[1][0]
    assert digests == {size: [expected] * size for size in CASES[name].sizes}


@pytest.mark.parametrize("name", ["plain", "plain standby"])
def test_plain_mode_differs_by_rounding_only_for_every_number_of_workers(
    results: Results, name: str
) -> None:
    _, expected = results.ranks(name, 1)[0]
    for size, digests in results.digests(name).items():
        assert len(set(digests)) == 1, "the ranks differ among each other"
        for tensor, wanted in zip(results.ranks(name, size)[0][1], expected, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(tensor), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5
            )


def test_work_that_moves_in_mid_epoch_changes_no_bit(results: Results) -> None:
    expected = results.digests("full")[1][0]
    assert results.digests("balanced") == {size: [expected] * size for size in (4, 3, 2)}


@pytest.mark.parametrize("name", ["loaders", "by speed"])
def test_neither_loader_processes_nor_shares_by_speed_change_a_bit(
    results: Results, name: str
) -> None:
    expected = results.digests("two steps")[1][0]
    assert results.digests(name) == {2: [expected] * 2}


def test_exact_mode_gives_the_same_bits_for_every_history(results: Results) -> None:
    expected = results.digests("full")[1][0]
    assert results.histories == [expected] * len(HISTORIES)
