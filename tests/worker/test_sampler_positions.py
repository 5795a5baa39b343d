"""Wherever the world changes, a script trains each sample once an epoch, and validates on all.

A small model of a script runs in this process: its ranks train in lockstep, and a commit moves and
keeps the samplers as a state does. After each of its commits, in turn, the world changes: by a
drain, which rolls nothing back, or by a loss, which rolls back what came after the commit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastic_driver.worker import sampler as room
from elastic_driver.worker.sampler import ElasticSampler

SAMPLES, BATCH, EPOCHS = 8, 2, 2
CHANGES = ((1, 2, False), (2, 1, False), (1, 2, True), (2, 1, True))  # sizes; whether by a loss


@dataclass(frozen=True)
class Script:
    """How a script is written.

    Attributes:
        comes_back: `for state.epoch in range(state.epoch, …)`: a call begins with the epoch of the
            commit. Else `while state.epoch < …`, which commits after `state.epoch += 1`.
        names: calls `set_epoch`.
        batches: from one commit to the next; 0: it commits only after its loop.
        validates: "" not at all, "plain" with gradients on, "quiet" under `no_grad`, "named" with
            `set_epoch` under `no_grad`, "part" of the data under `no_grad`, "commits" inside.
        closes: commits after validation.
        iterates: "loader", "kept" (an iterator in a variable), "enumerate", "persistent".
        workers: of the loader.
    """

    comes_back: bool = True
    names: bool = True
    batches: int = 1
    validates: str = ""
    closes: bool = False
    iterates: str = "loader"
    workers: int = 0

    def __str__(self) -> str:
        return (
            f"{'for' if self.comes_back else 'while'}-{'named' if self.names else 'unnamed'}-"
            f"{self.batches}-{self.validates or 'no'}-{'closes' if self.closes else 'open'}-"
            f"{self.iterates}-{self.workers}"
        )


class Rank:
    """One worker: its samplers, its loaders, and the plain values of its state."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.values: dict[str, Any] = {"epoch": 0, "trained": [], "count": 0, "validated": []}
        self.seen: list[tuple[str, Any]] = []  # by this rank, since the ranks last met
        self.sampler = ElasticSampler(range(SAMPLES), seed=1)
        self.checked = ElasticSampler(range(SAMPLES), shuffle=script.validates == "named")
        options: dict[str, Any] = {"batch_size": BATCH, "num_workers": script.workers}
        if script.iterates == "persistent":
            options["persistent_workers"] = True
        data: Any = range(SAMPLES)
        self.loader = DataLoader(data, sampler=self.sampler, **options)
        self.check_loader = DataLoader(data, sampler=self.checked, **options)
        self.kept: Any = None

    @property
    def samplers(self) -> list[ElasticSampler]:
        return [self.sampler, self.checked]

    # ---- the script ----------------------------------------------------------------------

    def train(self) -> Iterator[None]:
        """The decorated function; each `yield` is a commit."""
        values = self.values
        if self.script.comes_back:
            for values["epoch"] in range(values["epoch"], EPOCHS):  # noqa: B020 - as scripts do
                yield from self._epoch()
                if self.script.closes:
                    yield
            return
        while values["epoch"] < EPOCHS:
            yield from self._epoch()
            values["epoch"] += 1
            yield

    def _epoch(self) -> Iterator[None]:
        script, values = self.script, self.values
        if script.names:
            self.sampler.set_epoch(values["epoch"])
        for number, batch in self._iterate(self.loader):
            self.seen.append(("trained", [(values["epoch"], index) for index in batch.tolist()]))
            if script.batches and (number + 1) % script.batches == 0:
                yield
        if script.validates:
            yield from self._validate()

    def _validate(self) -> Iterator[None]:
        script = self.script
        if script.validates == "named":
            self.checked.set_epoch(self.values["epoch"])
        with nullcontext() if script.validates in ("plain", "commits") else torch.no_grad():
            for _, batch in self._iterate(self.check_loader):
                self.seen.append(("checked", len(batch)))
                if script.validates == "part":
                    break
                if script.validates == "commits":
                    yield
        self.seen.append(("validated", None))

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[tuple[int, Any]]:
        if self.script.iterates == "enumerate":
            yield from enumerate(loader)
        elif self.script.iterates == "kept":
            self.iterator = iter(loader)  # stays when the loop has ended
            for number in itertools.count():
                try:
                    batch = next(self.iterator)
                except StopIteration:
                    return
                yield number, batch
        else:
            for number, batch in zip(itertools.count(), loader, strict=False):
                yield number, batch

    # ---- the state -----------------------------------------------------------------------

    def commit(self) -> None:
        for sampler in self.samplers:
            sampler.advance()
        self.kept = deepcopy(([s.state_dict() for s in self.samplers], self.values))

    def roll_back(self) -> None:
        self.load(self.kept)
        self.seen = []

    def load(self, kept: Any) -> None:
        positions, values = deepcopy(kept)
        for sampler, position in zip(self.samplers, positions, strict=True):
            sampler.load_state_dict(position)
        self.values.clear()
        self.values.update(values)


class Job:
    """Ranks in lockstep, through one change of the world."""

    def __init__(self, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script, self.at = script, (0, 1)
        monkeypatch.setattr(room, "rank_and_size", lambda: self.at)

    def run(self, size: int, change_at: int, then: int, *, lost: bool) -> dict[str, Any]:
        """Train; after commit number `change_at` go on with `then` ranks. Return the values."""
        ranks = [Rank(self.script) for _ in range(size)]
        commits = 0
        loops = [rank.train() for rank in ranks]
        while self._step(ranks, loops):
            for number, rank in enumerate(ranks):
                self.at = (number, len(ranks))
                rank.commit()
            assert all(r.kept[0] == ranks[0].kept[0] for r in ranks), "positions differ by rank"
            commits += 1
            if commits != change_at:
                continue
            if lost:
                self._step(ranks, loops)
            del loops  # as `run` clears the frames
            ranks = self._change(ranks, then, lost=lost)
            loops = [rank.train() for rank in ranks]
        self.commits = commits
        return ranks[0].values

    def _step(self, ranks: list[Rank], loops: list[Iterator[None]]) -> bool:
        went = []
        for number, loop in enumerate(loops):
            self.at = (number, len(ranks))
            went.append(next(loop, "over") != "over")
        assert len(set(went)) == 1, "a rank has another number of commits"
        meet(ranks)
        return went[0]

    def _change(self, ranks: list[Rank], then: int, *, lost: bool) -> list[Rank]:
        survivors = ranks[: min(then, len(ranks))]
        for rank in survivors:
            if lost:
                rank.roll_back()
            for sampler in rank.samplers:
                sampler.reset()
        first = survivors[0]
        sent = [sampler.state_dict() for sampler in first.samplers], first.values
        newcomers = [Rank(self.script) for _ in range(then - len(survivors))]
        for rank in newcomers:
            rank.load(sent)
        return survivors + newcomers


def check(
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    changes: Sequence[tuple[int, int, bool]] = CHANGES,
    at: Sequence[int] | None = None,
) -> None:
    """Run a script without a change, and with one after each of its commits, or of those `at`."""
    wrong = []
    for size, then, lost in changes:
        for change_at in itertools.count() if at is None else at:
            job = Job(script, monkeypatch)
            values = job.run(size, change_at, then, lost=lost)
            found = problem(script, values)
            if change_at > job.commits:
                break
            if found:
                wrong.append((f"{size} -> {then} after {change_at}, lost={lost}", found))
    assert wrong == []


def meet(ranks: list[Rank]) -> None:
    """As an all-gather in the script: each rank knows what all have seen."""
    assert len({len(rank.seen) for rank in ranks}) == 1, "a rank has another number of batches"
    for events in zip(*(rank.seen for rank in ranks), strict=True):
        for values in (rank.values for rank in ranks):
            kind = events[0][0]
            if kind == "trained":
                values["trained"] += [sample for _, samples in events for sample in samples]
            elif kind == "checked":
                values["count"] += sum(count for _, count in events)
            else:
                values["validated"].append(values["count"])
                values["count"] = 0
    for rank in ranks:
        rank.seen = []


def problem(script: Script, values: dict[str, Any]) -> str:
    """What is wrong with the end of a job."""
    trained = Counter(values["trained"])
    expected = Counter(itertools.product(range(EPOCHS), range(SAMPLES)))
    if trained != expected:
        return (
            f"trained {dict(trained - expected)} too often, {dict(expected - trained)} too rarely"
        )
    counts = values["validated"]
    whole = {BATCH, 2 * BATCH} if script.validates == "part" else {SAMPLES}
    if script.validates and (len(counts) < EPOCHS or set(counts) - whole):
        return f"validated on {counts}"
    return ""


SCRIPTS = [
    Script(comes_back, names, batches, validates, closes)
    for comes_back, names, batches, validates, closes in itertools.product(
        (True, False),
        (True, False),
        (1, 2, 0),
        ("", "plain", "quiet", "named", "part", "commits"),
        (True, False),
    )
    # A script that comes back to an epoch whose loop has ended has to name it: see the last test.
    if names or not ((comes_back and closes) or validates == "commits")
    if (batches or closes if comes_back else closes)
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_each_sample_is_trained_once_wherever_the_world_changes(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(script, monkeypatch)


@pytest.mark.parametrize("validates", ["plain", "quiet"])
@pytest.mark.parametrize("batches", [1, 0])
@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("iterates", ["kept", "enumerate"])
def test_it_makes_no_difference_who_holds_the_loaders_iterator(
    validates: str, batches: int, names: bool, iterates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Script(names, names, batches, validates, True, iterates), monkeypatch)


@pytest.mark.parametrize("iterates", ["loader", "persistent", "kept"])
@pytest.mark.parametrize("names", [True, False])
def test_it_makes_no_difference_who_reads_ahead(
    iterates: str, names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(names, names, 1, "plain", True, iterates, workers=1)
    # In the loop, in its last batch, and after validation; starting processes takes long.
    check(script, monkeypatch, [(1, 2, True)], at=(2, 4, 5))


def test_a_script_that_comes_back_to_an_epoch_that_is_over_trains_the_next_and_was_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `set_epoch` nobody knows that it comes back, and does not begin the next one."""
    with pytest.raises(AssertionError, match="too often"):
        check(Script(names=False, closes=True), monkeypatch)
    assert "calls sampler.set_epoch(state.epoch) before its loop" in capsys.readouterr().err
