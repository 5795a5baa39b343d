"""Shards across drivers that die at any moment, with a journal that is written late.

The rule: a driver answers a request once its journal has it. Then every record is trained once, if
no worker dies. A driver that answers earlier is found out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.shards.messages import (
    DoneRequest,
    End,
    Granted,
    NextRequest,
    RangeDescription,
    Shard,
    ShardBatch,
    ShardRequest,
)
from elastic_driver.features.shards.sources import check_saved
from elastic_driver.job.events import DriverResumed
from elastic_driver.kernel.machine import Reply
from elastic_driver.words.wire_events import WorkerStarted

DATA = RangeDescription(60, 5, epochs=2, seed=3)
SHARDS = 24
SEEDS = range(100)
MOST_TURNS = 200  # until the end, once no driver dies any more


@dataclass
class Trainer:
    """A worker that sends one request after the other, each until it is answered."""

    name: str
    asks: NextRequest | DoneRequest | None = None
    number: int = 0  # of its requests for shards
    held: list[Granted] = field(default_factory=list)
    ended: bool = False

    def think(self, random: Random) -> None:
        """Choose the next request."""
        if self.asks is not None or (self.ended and not self.held):
            return
        if self.held and (self.ended or random.random() < 0.5):
            oldest = self.held.pop(0)
            self.asks = DoneRequest(self.name, oldest.shard, oldest.token)
        else:
            self.number += 1
            self.asks = NextRequest(self.name, DATA, request=f"{self.name}-{self.number}")


class Run:
    """Workers, the driver of now, and a journal of which only a part is on the disk."""

    def __init__(self, seed: int, *, answers_early: bool) -> None:
        self.random, self.answers_early = Random(seed), answers_early
        self.trainers = [Trainer(name) for name in ("a.0.1", "b.0.1", "c.0.1")]
        self.machine, self.term = DataSets(), 1
        self.journal: list[Any] = []
        self.written = 0
        self.snapshot: tuple[int, bytes] | None = None  # after so many events
        self.waiting: list[tuple[int, Reply]] = []  # answers, and the events they wait for
        self.asked: dict[int, Trainer] = {}  # by ticket
        self.trained: Counter[Shard] = Counter()
        for trainer in self.trainers:
            self.handle(WorkerStarted(trainer.name, 1))
        self.write()

    def handle(self, event: Any) -> None:
        """Do what the driver's loop does with an event."""
        self.journal.append(event)
        replies = [each for each in self.machine.handle(event, 0.0) if isinstance(each, Reply)]
        assert self.machine.check() == []
        for ledger in self.machine._ledgers.values():
            check_saved(ledger.dataset, ledger.checkpoint().state)  # it could be restored
        self.waiting += [(len(self.journal), reply) for reply in replies]
        if self.answers_early:
            self.answer(len(self.journal))

    def write(self) -> None:
        """Write a part of what waits for the disk, and answer whom that concerns."""
        self.written = self.random.randint(self.written, len(self.journal))
        self.answer(self.written)

    def answer(self, up_to: int) -> None:
        """Give the answers that follow from the first events."""
        due = [reply for n, reply in self.waiting if n <= up_to]
        self.waiting = [(n, reply) for n, reply in self.waiting if n > up_to]
        for reply in due:
            trainer = self.asked.pop(reply.ticket)
            trainer.asks = None
            if isinstance(reply.document, Granted):
                self.trained[reply.document.shard] += 1
                trainer.held.append(reply.document)
            trainer.ended = trainer.ended or isinstance(reply.document, End)

    def ask(self) -> None:
        """Have some workers send their requests, which are handled together."""
        requests = []
        for trainer in self.trainers:
            trainer.think(self.random)
            under_way = any(each is trainer for each in self.asked.values())
            if trainer.asks is not None and not under_way and self.random.random() < 0.7:
                ticket = 1 + max(self.asked, default=0)
                self.asked[ticket] = trainer
                requests.append(ShardRequest(ticket, "d", trainer.asks))
        if requests:
            self.handle(ShardBatch(tuple(requests)))

    def keep(self) -> None:
        """Make a snapshot, which is on the disk when all events before it are."""
        self.snapshot = len(self.journal), self.machine.snapshot()

    def die(self) -> None:
        """Lose what is not on the disk; the next driver goes on, and every worker asks again."""
        self.journal = self.journal[: self.written]
        self.machine, first = DataSets(), 0
        if self.snapshot is not None and self.snapshot[0] <= self.written:
            first, self.machine = self.snapshot[0], DataSets.restored(self.snapshot[1])
        else:
            self.snapshot = None
        for event in self.journal[first:]:
            self.machine.handle(event, 0.0)
        self.waiting.clear()
        self.asked.clear()
        self.term += 1
        self.handle(DriverResumed(self.term, "the driver has died"))

    def play(self) -> Counter[Shard]:
        """Return how often each shard was trained."""
        for _ in range(120):
            kinds = (self.ask, self.write, self.keep, self.die)
            self.random.choices(kinds, (6, 4, 1, 1))[0]()
        for _ in range(MOST_TURNS):
            if all(each.ended and each.asks is None and not each.held for each in self.trainers):
                break
            self.ask()
            self.written = len(self.journal)
            self.answer(self.written)
        return self.trained


def test_every_shard_is_trained_once_whenever_drivers_die() -> None:
    for seed in SEEDS:
        trained = Run(seed, answers_early=False).play()
        assert len(trained) == SHARDS, f"seed {seed}"
        assert set(trained.values()) == {1}, f"seed {seed}"


def test_a_driver_that_answers_before_its_journal_has_the_request_is_found_out() -> None:
    early = [Run(seed, answers_early=True).play() for seed in SEEDS[:10]]
    assert any(max(trained.values()) > 1 for trained in early)
