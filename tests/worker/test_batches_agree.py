"""FixedBatch on three real processes: buffers of every kind, and ranks that do not do the same."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.batches import FixedBatch
from tests.support.gloo import run_ranks
from tests.worker.batching import kinds
from tests.worker.test_batches_exact import world_of

SIZES = (3, 2, 1)


class Samples(torch.utils.data.Dataset[Tensor]):
    """Numbers; those of each second micro-batch of two begin with a positive one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        found = torch.randn(4, generator=torch.Generator().manual_seed(index))
        found[0] = (-1) ** (index // 2)
        return found


def batches_of(model: nn.Module, exact: bool = True, **options: Any) -> FixedBatch:
    options = {"virtual_workers": 5, "micro_batch_size": 2, "shuffle": False, **options}
    return FixedBatch(Samples(), model=model, deterministic=exact, **options)


def steps_of(batches: FixedBatch, model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches:
        for inputs in step:
            model(inputs).square().mean().backward()
        optimizer.step()
        batches.advance()
        if step.number + 1 == steps:
            return


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(
        {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    ):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def message_of(train: Callable[[], None]) -> str:
    try:
        train()
    except UsageError as error:
        return str(error)
    return "no error"


# ---- buffers -----------------------------------------------------------------------------


def train_kind(make: Callable[[], nn.Module], exact: bool, virtual_workers: int) -> str:
    torch.manual_seed(0)
    model = kinds.Kept(make())
    steps_of(batches_of(model, exact, virtual_workers=virtual_workers), model)
    return digest_of(model)


def refuse_kind(make: Callable[[], nn.Module], exact: bool) -> str:
    torch.manual_seed(0)
    model = kinds.Kept(make())
    return message_of(lambda: steps_of(batches_of(model, exact), model))


def another_in_each() -> nn.Module:
    return kinds.Late(kinds.mean, False)


# ---- ranks that do not do the same -------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.inside: Callable[[Two, Tensor], None] = lambda model, inputs: None

    def forward(self, inputs: Tensor) -> Tensor:
        self.inside(self, inputs)
        found: Tensor = self.second(self.first(inputs).tanh())
        return found


Mistake = Callable[[Two, FixedBatch, int], None]  # of a rank, between two steps


def freezes(model: Two, _batches: FixedBatch, rank: int) -> None:
    model.first.requires_grad_(rank != 1)


def freezes_everything(model: Two, _batches: FixedBatch, rank: int) -> None:
    model.requires_grad_(rank != 1)


def adds(model: Two, _batches: FixedBatch, rank: int) -> None:
    if rank == 2:
        model.third = nn.Linear(2, 2)


def replaces(model: Two, _batches: FixedBatch, rank: int) -> None:
    if rank == 0:
        model.first = nn.Sequential(nn.Linear(4, 4))


def ties(model: Two, _batches: FixedBatch, rank: int) -> None:
    if rank == 1:
        model.second.bias = nn.Parameter(model.first.bias[:3].detach())
        model.tied = model.second.bias


def trains_more(model: Two, batches: FixedBatch, rank: int) -> None:
    batches.trained_by([*model.parameters(), *[nn.Parameter(torch.zeros(rank + 1))]])


def orders_otherwise(model: Two, batches: FixedBatch, rank: int) -> None:
    extra = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())]
    batches.trained_by(extra[::-1] if rank == 1 else extra)


def has_another_buffer(model: Two, _batches: FixedBatch, rank: int) -> None:
    model.register_buffer("seen", torch.zeros(1 + rank))


def is_lazy(model: Two, _batches: FixedBatch, rank: int) -> None:
    if rank == 1:
        model.second = nn.LazyLinear(3)


def unfreezes_inside(model: Two, _batches: FixedBatch, rank: int) -> None:
    model.first.requires_grad_(False)
    model.inside = lambda model, inputs: model.first.requires_grad_(True)


def adds_inside(model: Two, _batches: FixedBatch, rank: int) -> None:
    def inside(model: Two, inputs: Tensor) -> None:
        model.first = nn.Linear(4, 4)

    model.inside = inside


def adds_buffers_inside(model: Two, _batches: FixedBatch, rank: int) -> None:
    def inside(model: Two, inputs: Tensor) -> None:
        model.norm = nn.BatchNorm1d(4)

    model.inside = inside


def embeds(model: Two, _batches: FixedBatch, rank: int) -> None:
    model.table = nn.Embedding(30, 3, sparse=True)

    def inside(model: Two, inputs: Tensor) -> None:
        model.table(torch.tensor([1])).sum().backward()

    model.inside = inside


def moves_parameters(model: Two, _batches: FixedBatch, rank: int) -> None:
    model.momentum = nn.Linear(4, 4).requires_grad_(False)

    def inside(model: Two, inputs: Tensor) -> None:
        for slow, fast in zip(model.momentum.parameters(), model.first.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1

    model.inside = inside


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "frozen on one rank": (
        freezes,
        "rank 0 has parameter first.weight (4, 4) float32, rank 1 has not",
    ),
    "all frozen on one rank": (freezes_everything, "nothing to train"),
    "added on one rank": (adds, "rank 2 has parameter third.weight (2, 2) float32, rank 0 has not"),
    "replaced on one rank": (
        replaces,
        "rank 1 has parameter first.weight (4, 4) float32, rank 0 has parameter first.0.weight",
    ),
    "tied on one rank": (ties, "rank 1 has parameter tied"),
    "another optimizer": (
        trains_more,
        "rank 1 has parameter 4 of the optimizers (2,) float32, rank 0 has parameter 4",
    ),
    "another order": (orders_otherwise, "rank 1 has parameter 0 of the optimizers (2,) float64"),
    "another buffer": (has_another_buffer, "rank 1 has buffer seen (2,) float32"),
    "lazy on one rank": (is_lazy, "second.weight has no shape yet"),
    "unfrozen inside the loop": (
        unfreezes_inside,
        "parameter first.weight got a gradient, but did not require one when step 1 of epoch 0",
    ),
    "added inside the loop": (adds_inside, "parameter first.weight got a gradient"),
    "buffers inside the loop": (adds_buffers_inside, "module with buffers was added inside"),
    "sparse": (embeds, "cannot add sparse gradients, as that of parameter table.weight"),
    "momentum encoder": (moves_parameters, "parameter momentum.weight was changed inside the loop"),
}


def make_mistake(mistake: Mistake, rank: int, exact: bool, **options: Any) -> str:
    model = Two()
    batches = batches_of(model, exact, **options)

    def train() -> None:
        steps_of(batches, model, 1)
        mistake(model, batches, rank)
        steps_of(batches, model, 10)
        steps_of(batches, model, 10)

    return message_of(train)


def of_another_step(rank: int) -> str:
    model = Two()
    batches = batches_of(model)
    batches.step = rank
    return message_of(lambda: steps_of(batches, model, 3))


def of_other_shares(rank: int) -> str:
    model = Two()
    batches = batches_of(model, shares=lambda count, size: [rank, *[0] * (size - 2), count - rank])
    return message_of(lambda: steps_of(batches, model, 3))


def outside_of_the_model(exact: bool) -> str:
    """A loss with parameters of its own, of which FixedBatch learns from the state."""
    model, temperature = Two(), nn.Parameter(torch.ones(2))
    batches = batches_of(model, exact)
    batches.trained_by([temperature, *model.parameters()])
    optimizer = torch.optim.SGD([temperature, *model.parameters()], lr=0.1)
    for step in batches:
        for inputs in step:
            (model(inputs).square().mean() * temperature.sum()).backward()
        optimizer.step()
    model.temperature = temperature
    return digest_of(model)


def of_sixteen_bits(exact: bool) -> str:
    model = Two().to(torch.bfloat16)
    batches = batches_of(model, exact, collate_fn=lambda found: torch.stack(found).bfloat16())
    steps_of(batches, model)
    return digest_of(model)


def calibrated(exact: bool) -> str:
    """Frozen, with nothing to sum but buffers; the first step has nothing at all."""
    model = kinds.Kept(nn.Identity()).requires_grad_(False)
    batches = batches_of(model, exact)
    with torch.no_grad():
        for step in batches:
            for inputs in step:
                model(inputs)
            batches.advance()
            model.keeper = nn.BatchNorm1d(4)
            model.requires_grad_(False)
    return digest_of(model)


def gradually_unfrozen(exact: bool) -> str:
    model = Two()
    model.first.requires_grad_(False)
    batches = batches_of(model, exact)
    steps_of(batches, model, 1)
    model.first.requires_grad_(True)
    steps_of(batches, model, 2)
    batches.set_epoch(1)
    model.second.bias.requires_grad_(False)
    model.first.weight = nn.Parameter(torch.ones(4, 4))
    model.extra = model.first.weight
    steps_of(batches, model, 2)
    return digest_of(model)


Found = dict[tuple[Any, ...], str]


def train_all(rank: int, _size: int) -> Found:
    warnings.filterwarnings("ignore", module="torch.ao")
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    found: Found = {}
    for size in SIZES:
        if rank < size:
            with world_of(groups[size], rank, size):
                train_in_a_world(rank, size, found)
    with world_of(groups[3], rank, 3):
        for name, (mistake, _) in MISTAKES.items():
            for exact in (True, False):
                found["mistake", name, exact] = make_mistake(mistake, rank, exact)
        standby = {"virtual_workers": 2}
        found["mistake", "unfrozen inside the loop", "standby"] = make_mistake(
            unfreezes_inside, rank, True, **standby
        )
        found["mistake", "another step", True] = of_another_step(rank)
        found["mistake", "other shares", True] = of_other_shares(rank)
        found["mistake", "made, another in each", True] = refuse_kind(another_in_each, True)
        found["mistake", "synchronized", True] = refuse_kind(lambda: nn.SyncBatchNorm(4), True)
    return found


def train_in_a_world(rank: int, size: int, found: Found) -> None:
    for name, make in kinds.TRAINED.items():
        for virtual_workers in (5, 2):
            found["kind", name, virtual_workers, size] = train_kind(make, True, virtual_workers)
        found["plain", name, size] = train_kind(make, False, 5)
    for name, (make, _) in kinds.REFUSED.items():
        found["refused", name, size] = refuse_kind(make, size % 2 == 0)
    found["outside", size] = outside_of_the_model(True)
    found["unfrozen", size] = gradually_unfrozen(True)
    found["sixteen bits", size] = of_sixteen_bits(True)
    found["calibrated", size] = calibrated(True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found: starting processes takes longer than the training."""
    return run_ranks(3, train_all, tmp_path_factory.mktemp("ranks"))


class Everywhere(NamedTuple):
    """What the ranks of worlds of each size found."""

    results: list[Found]

    def of(self, *key: Any) -> dict[int, list[str]]:
        return {n: [self.results[rank][(*key, n)] for rank in range(n)] for n in SIZES}


@pytest.mark.parametrize("virtual_workers", [5, 2])
@pytest.mark.parametrize("name", kinds.TRAINED)
def test_buffers_have_the_same_bits_for_every_number_of_workers(
    results: list[Found], name: str, virtual_workers: int
) -> None:
    """With two virtual workers, the third worker has no micro-batch."""
    expected = results[0]["kind", name, virtual_workers, 1]
    found = Everywhere(results).of("kind", name, virtual_workers)
    assert found == {size: [expected] * size for size in SIZES}


@pytest.mark.parametrize("name", kinds.TRAINED)
def test_in_plain_mode_buffers_are_the_same_on_every_rank(results: list[Found], name: str) -> None:
    for found in Everywhere(results).of("plain", name).values():
        assert len(set(found)) == 1


@pytest.mark.parametrize("name", kinds.REFUSED)
def test_what_has_no_mean_is_refused_on_all_ranks_in_the_same_words(
    results: list[Found], name: str
) -> None:
    for found in Everywhere(results).of("refused", name).values():
        assert len(set(found)) == 1
        assert "buffer keeper." in found[0]


@pytest.mark.parametrize("what", ["outside", "unfrozen", "sixteen bits", "calibrated"])
def test_whatever_is_trained_has_the_same_bits_for_every_number_of_workers(
    results: list[Found], what: str
) -> None:
    """Parameters of the optimizers outside of the model; unfrozen, frozen and replaced layers."""
    found = Everywhere(results).of(what)
    assert found == {size: [found[1][0]] * size for size in SIZES}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", MISTAKES)
def test_ranks_that_do_not_do_the_same_all_end_with_the_same_named_error(
    results: list[Found], name: str, exact: bool
) -> None:
    found = [each["mistake", name, exact] for each in results]
    assert len(set(found)) == 1
    assert MISTAKES[name][1] in found[0]


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("unfrozen inside the loop", "standby", "parameter first.weight got a gradient"),
        ("another step", True, "rank 1 has step 1 of epoch 0"),
        ("other shares", True, "rank 1 has step 0 of epoch 0 with 1+0+4 micro-batches, rank 0 has"),
        ("made, another in each", True, "buffer keeper.made was made in this step, with another"),
        ("synchronized", True, "SyncBatchNorm computes with the samples of as many micro-batches"),
    ],
)
def test_other_differences_of_ranks_are_named_too(
    results: list[Found], name: str, how: Any, words: str
) -> None:
    found = [each["mistake", name, how] for each in results]
    assert len(set(found)) == 1
    assert words in found[0]
