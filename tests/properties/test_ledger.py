"""No shard is lost, none is counted twice, whoever dies when."""

from __future__ import annotations

import tracemalloc

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from elastic_driver.features.shards.messages import (
    End,
    Granted,
    RangeDescription,
    Shard,
    ShardAccepted,
    ShardRefused,
)
from elastic_driver.features.shards.shard_ledger import ShardLedger
from tests.features.shards.test_shard_ledger import _train, finish, grant


def test_a_million_shards_take_no_memory_before_or_after_they_are_done() -> None:
    tracemalloc.start()
    ledger = ShardLedger(RangeDescription(10**9, 1000, seed=1))
    for _ in range(2000):
        finish(ledger, "w", grant(ledger, "w"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ledger.counts().done_records == 2_000_000
    assert kept < 200_000  # bytes
    assert len(msgspec.json.encode(ledger.checkpoint().state)) < 300


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of workers against one rule: per epoch each shard counts once, or is named."""

    grants = Bundle("grants")
    workers = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        dataset = RangeDescription(35, 5, epochs=2, seed=9, max_losses=2)
        self.ledger = ShardLedger(dataset, lease=10.0, max_held=2)
        self.counted: list[Shard] = []
        self.current: dict[Shard, tuple[str, int]] = {}
        self.ended: End | None = None

    @rule(target=grants, worker=workers)
    def ask(self, worker: str) -> object:
        answer = self.ledger.next(worker, self.now)
        if isinstance(answer, Granted):
            assert answer.shard not in self.counted, "handed out after it was done"
            assert answer.shard not in self.current, "handed out while somebody has it"
            assert all(answer.token > token for _, token in self.current.values())
            self.current[answer.shard] = (worker, answer.token)
            return worker, answer
        if isinstance(answer, End):
            assert not self.current, "told the end while others hold shards"
            self.ended = answer
        return multiple()

    @rule(granted=grants)
    def report(self, granted: tuple[str, Granted]) -> None:
        worker, grant = granted
        verdict = self.ledger.done(worker, grant.shard, grant.token, self.now)
        holder = self.current.get(grant.shard)
        if holder == (worker, grant.token):
            assert isinstance(verdict, ShardAccepted)
            del self.current[grant.shard]
        if holder is not None and holder != (worker, grant.token):
            assert isinstance(verdict, ShardRefused)
        elif isinstance(verdict, ShardAccepted) and grant.shard not in self.counted:
            self.counted.append(grant.shard)

    @rule(worker=workers, blame=st.booleans())
    def leave(self, worker: str, blame: bool) -> None:
        if blame:
            self.ledger.worker_lost(worker, "killed")
        else:
            self.ledger.worker_left(worker)
        self.forget({worker})

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.ledger.deadline()
        self.ledger.expire(self.now)
        if deadline is not None and deadline <= self.now:
            held = {worker for worker, _ in self.current.values()}
            self.forget({w for w in held if w not in self.ledger._holders})

    def forget(self, workers: set[str]) -> None:
        self.current = {s: who for s, who in self.current.items() if who[0] not in workers}

    @invariant()
    def books_balance(self) -> None:
        counts = self.ledger.counts()
        assert counts.done == len(self.counted) == len(set(self.counted))
        assert counts.doing == len(self.current)
        assert self.ledger._past.keys() <= (
            set(self.ledger._returned) | self.current.keys() | self.ledger._quarantine.keys()
        )

    def teardown(self) -> None:
        """Whatever happened, a worker that stays finishes the rest, and nothing is missing."""
        for worker in ("a", "b", "c"):
            self.ledger.worker_left(worker)
        self.counted += _train(self.ledger)
        named = [entry.shard for entry in self.ledger.quarantined()]
        assert len(self.counted) == len(set(self.counted))
        starts = range(0, 35, 5)
        ended_early = len(named) == len(starts) and not any(shard.epoch for shard in named)
        epochs = (0,) if ended_early else (0, 1)  # with all shards in quarantine nothing is left
        expected = [(epoch, start) for epoch in epochs for start in starts]
        assert sorted((s.epoch, s.start) for s in self.counted + named) == expected
        answer = self.ledger.next("w", self.now)
        assert isinstance(answer, End)
        assert answer.complete == (not named)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
