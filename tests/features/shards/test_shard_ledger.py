"""No shard is lost, none is counted twice, whoever dies when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import UsageError
from elastic_driver.features.shards.messages import (
    WORLD,
    AgreeRequest,
    Claim,
    Description,
    End,
    Granted,
    RangeDescription,
    Shard,
    ShardAccepted,
    ShardCheckpoint,
    ShardRefused,
    StreamDescription,
    Wait,
)
from elastic_driver.features.shards.shard_ledger import ShardLedger
from elastic_driver.features.shards.sources import StreamSource
from elastic_driver.features.shards.standing import ShardStanding


def in_order(records: int = 30, shard_records: int = 10, **more: Any) -> RangeDescription:
    return RangeDescription(records, shard_records, shuffle=False, **more)


def stream_of(ledger: ShardLedger) -> StreamSource:
    assert isinstance(ledger.source, StreamSource)
    return ledger.source


def grant(ledger: ShardLedger, worker: str, now: float = 0.0) -> Granted:
    answer = ledger.next(worker, now)
    assert isinstance(answer, Granted), answer
    return answer


def finish(ledger: ShardLedger, worker: str, granted: Granted, now: float = 0.0) -> None:
    assert isinstance(ledger.done(worker, granted.shard, granted.token, now), ShardAccepted)


def rest(ledger: ShardLedger, worker: str = "w") -> list[Shard]:
    """Train everything that is left; the shards in the order they came."""
    shards = []
    while isinstance(answer := ledger.next(worker, 0.0), Granted):
        finish(ledger, worker, answer)
        shards.append(answer.shard)
    assert isinstance(answer, End), answer
    return shards


def test_every_record_is_handed_out_once_and_the_last_shard_may_be_short() -> None:
    shards = rest(ShardLedger(RangeDescription(25, 10, shuffle=True, seed=3)))
    assert sorted((s.start, s.stop) for s in shards) == [(0, 10), (10, 20), (20, 25)]


def test_each_epoch_has_an_order_of_its_own_given_by_the_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        shards = rest(ShardLedger(RangeDescription(100, 1, epochs=2, seed=seed)))
        return [[s.start for s in shards if s.epoch == epoch] for epoch in (0, 1)]

    first, second = orders(1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert orders(1) == [first, second]
    assert orders(2) != [first, second]


def test_a_data_set_without_records_is_complete_at_once() -> None:
    answer = ShardLedger(RangeDescription(0, 10, epochs=None)).next("w", 0.0)
    assert isinstance(answer, End)
    assert answer.complete


def test_a_lost_workers_shards_come_back_first_and_in_their_order() -> None:
    ledger = ShardLedger(in_order(50))
    first, second = grant(ledger, "a"), grant(ledger, "a")
    third = grant(ledger, "b")
    ledger.worker_lost("a", "killed")
    again = [grant(ledger, "b").shard, grant(ledger, "b").shard, grant(ledger, "b").shard]
    assert again == [first.shard, second.shard, Shard(0, "", 30, 40)]
    assert third.token > second.token > first.token


def test_who_asks_while_others_still_hold_shards_waits_and_may_get_them() -> None:
    ledger = ShardLedger(in_order(10))
    only = grant(ledger, "slow")
    answer = ledger.next("fast", 0.0)
    assert isinstance(answer, Wait)
    assert "slow" in answer.reason
    ledger.worker_lost("slow", "killed")
    again = grant(ledger, "fast")
    assert again.shard == only.shard
    finish(ledger, "fast", again)
    assert isinstance(ledger.next("fast", 0.0), End)


def test_the_next_epoch_waits_for_the_last_shard_of_this_one() -> None:
    ledger = ShardLedger(in_order(10, epochs=2))
    held = grant(ledger, "a")
    assert isinstance(ledger.next("b", 0.0), Wait)
    finish(ledger, "a", held)
    assert grant(ledger, "b").shard.epoch == 1


def test_a_late_done_counts_while_nobody_else_has_the_shard() -> None:
    ledger = ShardLedger(in_order(20))
    granted = grant(ledger, "a")
    ledger.worker_lost("a", "cut off")
    assert ledger.done("a", granted.shard, granted.token, 0.0) == ShardAccepted(
        granted.shard, late=True
    )
    assert [shard.start for shard in rest(ledger)] == [10]


def test_a_late_done_is_refused_once_somebody_else_has_the_shard() -> None:
    ledger = ShardLedger(in_order(10))
    old = grant(ledger, "a")
    ledger.worker_lost("a", "cut off")
    new = grant(ledger, "b")
    verdict = ledger.done("a", old.shard, old.token, 0.0)
    assert isinstance(verdict, ShardRefused)
    assert verdict.code == "held"
    assert "taken from a; b has it" in verdict.reason
    finish(ledger, "b", new)
    verdict = ledger.done("a", old.shard, old.token, 0.0)
    assert isinstance(verdict, ShardRefused)
    assert verdict.code == "done"
    assert ledger.counts().done == 1


def test_a_worker_that_gets_its_own_shard_again_needs_the_new_token() -> None:
    ledger = ShardLedger(in_order(10))
    old = grant(ledger, "a")
    ledger.worker_lost("a", "cut off")
    new = grant(ledger, "a")
    assert isinstance(ledger.done("a", old.shard, old.token, 0.0), ShardRefused)
    finish(ledger, "a", new)


def test_a_report_repeated_because_its_answer_was_lost_gets_the_same_answer() -> None:
    ledger = ShardLedger(in_order(20))
    granted = grant(ledger, "a")
    finish(ledger, "a", granted)
    finish(ledger, "a", granted)
    assert ledger.counts().done == 1


def test_nobody_can_finish_a_shard_with_anothers_token() -> None:
    ledger = ShardLedger(in_order(10))
    granted = grant(ledger, "a")
    assert isinstance(ledger.done("b", granted.shard, granted.token, 0.0), ShardRefused)
    assert isinstance(ledger.done("b", Shard(0, "", 7, 9), 1, 0.0), ShardRefused)
    finish(ledger, "a", granted)


def test_a_silent_worker_loses_its_shards_when_its_lease_is_over() -> None:
    ledger = ShardLedger(in_order(10), lease=5.0)
    assert ledger.deadline() is None
    first = grant(ledger, "a", now=0.0)
    ledger.renew("a", 3.0)
    assert ledger.deadline() == 8.0
    ledger.expire(7.9)
    assert isinstance(ledger.next("b", 7.9), Wait)
    ledger.expire(8.0)
    assert grant(ledger, "b", 8.0).shard == first.shard


def test_a_shard_that_keeps_killing_workers_is_put_in_quarantine_by_name() -> None:
    ledger = ShardLedger(in_order(20, max_losses=2))
    grant(ledger, "a")
    assert ledger.worker_lost("a", "signal 11") == []
    grant(ledger, "b")
    (entry,) = ledger.worker_lost("b", "signal 11")
    assert entry.reason == "2 workers died training it, the last one b: signal 11"
    assert [shard.start for shard in _train(ledger)] == [10]
    answer = ledger.next("w", 0.0)
    assert isinstance(answer, End)
    assert not answer.complete
    assert answer.quarantined == ("epoch 0, records 0–9",)


def _train(ledger: ShardLedger) -> list[Shard]:
    shards = []
    while isinstance(answer := ledger.next("w", 0.0), Granted):
        finish(ledger, "w", answer)
        shards.append(answer.shard)
    return shards


def test_only_the_shard_in_training_is_blamed_not_those_fetched_ahead() -> None:
    ledger = ShardLedger(in_order(20, max_losses=1))
    grant(ledger, "a")
    ahead = grant(ledger, "a")
    ledger.worker_lost("a", "signal 11")
    assert [entry.shard.start for entry in ledger.quarantined()] == [0]
    assert grant(ledger, "b").shard == ahead.shard


def test_a_worker_that_leaves_as_planned_blames_no_shard() -> None:
    ledger = ShardLedger(in_order(10, max_losses=1))
    grant(ledger, "a")
    ledger.worker_left("a")
    assert ledger.quarantined() == ()
    assert len(rest(ledger)) == 1


def test_records_in_quarantine_are_not_handed_out_in_later_epochs() -> None:
    ledger = ShardLedger(in_order(20, epochs=2, max_losses=1))
    grant(ledger, "a")
    ledger.worker_lost("a", "signal 11")
    assert [(s.epoch, s.start) for s in _train(ledger)] == [(0, 10), (1, 10)]
    assert ledger.counts().quarantined == 2


@pytest.mark.parametrize("epochs", [None, 2**62])
def test_a_data_set_whose_shards_are_all_in_quarantine_ends_though_epochs_are_left(
    epochs: int | None,
) -> None:
    ledger = ShardLedger(in_order(20, max_losses=1, epochs=epochs))
    for worker in ("a", "b"):
        grant(ledger, worker)
        assert ledger.worker_lost(worker, "exit code 1")
    for _ in range(2):
        answer = ledger.next("c", 0.0)
        assert isinstance(answer, End)
        assert not answer.complete
        assert answer.quarantined == ("epoch 0, records 0–9", "epoch 0, records 10–19")


def test_a_late_done_takes_a_shard_out_of_quarantine() -> None:
    ledger = ShardLedger(in_order(10, epochs=2, max_losses=1))
    granted = grant(ledger, "a")
    ledger.worker_lost("a", "cut off")
    finish(ledger, "a", granted)
    assert [shard.epoch for shard in rest(ledger)] == [1]


def test_one_worker_cannot_hoard_shards() -> None:
    ledger = ShardLedger(in_order(100), max_held=2)
    held = [grant(ledger, "a"), grant(ledger, "a")]
    assert isinstance(ledger.next("a", 0.0), Wait)
    finish(ledger, "a", held[0])
    grant(ledger, "a")


def test_a_restored_checkpoint_hands_out_what_was_not_done_and_takes_no_old_token() -> None:
    source = RangeDescription(100, 10, seed=5)
    ledger = ShardLedger(source)
    done, held, returned = grant(ledger, "a"), grant(ledger, "b"), grant(ledger, "c")
    finish(ledger, "a", done)
    ledger.worker_lost("c", "killed")
    saved = msgspec.json.encode(ledger.checkpoint())

    fresh = ShardLedger(RangeDescription(100, 10, seed=5))
    fresh.restore(msgspec.json.decode(saved, type=ShardCheckpoint))
    assert isinstance(fresh.done("b", held.shard, held.token, 0.0), ShardRefused)
    shards = rest(fresh)
    assert shards[:2] == [held.shard, returned.shard]
    assert sorted(s.start for s in [*shards, done.shard]) == list(range(0, 100, 10))


def test_a_rolled_back_ledger_refuses_tokens_given_out_after_the_checkpoint() -> None:
    ledger = ShardLedger(in_order(20))
    saved = ledger.checkpoint()
    granted = grant(ledger, "a")
    ledger.restore(saved)
    again = grant(ledger, "b")
    assert again.shard == granted.shard
    assert again.token > granted.token
    assert isinstance(ledger.done("a", granted.shard, granted.token, 0.0), ShardRefused)


def test_the_checkpoint_of_another_data_set_is_refused() -> None:
    stream = StreamDescription({"clicks": 0}, 10)
    with pytest.raises(UsageError, match="another data set"):
        ShardLedger(in_order()).restore(ShardLedger(stream).checkpoint())
    with pytest.raises(UsageError, match="another stream"):
        ShardLedger(stream).restore(ShardLedger(in_order()).checkpoint())


def test_a_streams_partitions_take_turns_and_its_end_is_known_only_when_closed() -> None:
    ledger = ShardLedger(StreamDescription({"a": 100, "b": 0}, 10))
    stream = stream_of(ledger)
    assert ledger.next("w", 0.0) == Wait("the stream has no new records")
    stream.extend("a", 125)
    stream.extend("b", 5)
    assert [(s.partition, s.start, s.stop) for s in _train(ledger)] == [
        ("a", 100, 110),
        ("b", 0, 5),
        ("a", 110, 120),
        ("a", 120, 125),
    ]
    stream.extend("b", 3)  # old news
    stream.extend("a", 0, closed=True)
    stream.extend("a", 999)  # after the end
    assert isinstance(ledger.next("w", 0.0), Wait)
    stream.extend("b", 0, closed=True)
    assert isinstance(ledger.next("w", 0.0), End)


def test_a_stream_goes_on_from_its_checkpoint_at_the_offsets_it_had() -> None:
    ledger = ShardLedger(StreamDescription({"a": 0}, 10))
    stream_of(ledger).extend("a", 30)
    finish(ledger, "w", grant(ledger, "w"))
    held = grant(ledger, "w")
    saved = ledger.checkpoint()
    restored = ShardLedger(StreamDescription({"a": 0}, 10))
    restored.restore(saved)
    stream_of(restored).extend("a", 0, closed=True)
    assert [s.start for s in rest(restored)] == [held.shard.start, 20]


def test_an_unknown_partition_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no partition 'c' in this stream; it has a, b"):
        StreamSource(StreamDescription({"b": 0, "a": 0}, 1)).extend("c", 1)


@pytest.mark.parametrize(
    "dataset",
    [
        RangeDescription(-1, 10),
        RangeDescription(10, 0),
        RangeDescription(10, 1, epochs=0),
        StreamDescription({}, 1),
        StreamDescription({"a": -1}, 1),
        in_order(max_losses=0),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(dataset: Description) -> None:
    with pytest.raises(UsageError):
        ShardLedger(dataset)


# ---- a world that tells what its model was trained with --------------------------------------


def agreement(dataset: Description, held: tuple[Claim, ...] = (), **more: Any) -> AgreeRequest:
    return AgreeRequest(WORLD, dataset, held, **more)


def claim(granted: Granted, trained: int = 0) -> Claim:
    return Claim(granted.shard, granted.token, trained)


def test_a_world_that_goes_on_keeps_its_tokens() -> None:
    ledger = ShardLedger(in_order(40))
    begun = ledger.agree(agreement(in_order(40)), 0.0)
    first, second = grant(ledger, WORLD), grant(ledger, WORLD)
    standing = ShardStanding(ShardCheckpoint(in_order(40), begun.state))
    standing.granted(first.shard, first.token)
    standing.granted(second.shard, second.token)
    held = (claim(first, 10), claim(second, 3))
    again = ledger.agree(agreement(in_order(40), held, state=standing.state), 0.0)
    assert again.held == held
    finish(ledger, WORLD, first)
    finish(ledger, WORLD, second)
    assert [shard.start for shard in rest(ledger, WORLD)] == [20, 30]
    assert ledger.counts().done_records == 40


def test_a_report_for_a_model_that_was_lost_counts_no_more() -> None:
    ledger = ShardLedger(in_order(30))
    begun = ledger.agree(agreement(in_order()), 0.0)
    first, second = grant(ledger, WORLD), grant(ledger, WORLD)
    finish(ledger, WORLD, first)
    back = ledger.agree(agreement(in_order(), state=begun.state), 0.0)
    assert back.held == ()
    assert ledger.counts().done == 0
    assert isinstance(ledger.done(WORLD, second.shard, second.token, 0.0), ShardRefused)
    assert [shard.start for shard in rest(ledger, WORLD)] == [0, 10, 20]


def test_an_agreement_that_comes_again_late_changes_nothing() -> None:
    ledger = ShardLedger(in_order(30))
    asked = agreement(in_order(), request="one")
    answer = ledger.agree(asked, 0.0)
    finish(ledger, WORLD, grant(ledger, WORLD))
    held = grant(ledger, WORLD)
    assert ledger.agree(asked, 0.0) == answer
    finish(ledger, WORLD, held)
    assert ledger.counts().done == 2


def test_agreements_that_are_remembered_are_few() -> None:
    ledger = ShardLedger(in_order(30))
    for number in range(100):
        ledger.agree(agreement(in_order(), request=f"{number}"), 0.0)
    assert len(ledger._agreed) == 8


def test_a_shard_that_is_claimed_twice_or_is_with_another_worker_is_held_once() -> None:
    ledger = ShardLedger(in_order(30))
    begun = ledger.agree(agreement(in_order()), 0.0)
    other, mine = grant(ledger, "a"), grant(ledger, WORLD)
    standing = ShardStanding(ShardCheckpoint(in_order(), begun.state))
    standing.granted(mine.shard, mine.token)
    held = (claim(mine, 2), claim(mine, 3), claim(other, 1))
    found = ledger.agree(agreement(in_order(), held, state=standing.state), 0.0)
    assert found.held == (claim(mine, 2),)
    assert ledger.check() == []
    finish(ledger, "a", other)
    finish(ledger, WORLD, mine)
    assert [shard.start for shard in rest(ledger)] == [20]


def test_the_state_of_another_data_set_is_refused_and_changes_nothing() -> None:
    ledger, stream = ShardLedger(in_order()), StreamDescription({"clicks": 0}, 10)
    state = ShardLedger(stream).checkpoint().state
    with pytest.raises(UsageError, match="another data set"):
        ledger.agree(agreement(in_order(), state=state), 0.0)
    assert len(rest(ledger)) == 3


def test_a_world_of_which_many_members_are_lost_at_once_is_one_loss() -> None:
    ledger = ShardLedger(in_order(30, max_losses=2))
    granted = grant(ledger, WORLD)
    for _ in range(4):
        assert ledger.blame(WORLD, "killed") == []
    ledger.resume(WORLD, {granted.token: 0}, 0.0)
    assert len(ledger.blame(WORLD, "killed")) == 1


@pytest.mark.parametrize("reported", [False, True])
def test_a_loss_counts_against_the_shard_in_training_and_not_one_that_was_trained_before_it(
    reported: bool,
) -> None:
    """A world reports a shard some steps after its last record."""
    ledger = ShardLedger(in_order(40, max_losses=2))
    begun = ledger.agree(agreement(in_order(40)), 0.0)
    trained, deadly = grant(ledger, WORLD), grant(ledger, WORLD)
    standing = ShardStanding(ShardCheckpoint(in_order(40), begun.state))
    standing.granted(trained.shard, trained.token)
    standing.granted(deadly.shard, deadly.token)
    held = (claim(trained, 10), claim(deadly, 4))
    asked = agreement(in_order(40), held, state=standing.state)
    assert ledger.blame(WORLD, "the first was killed") == []
    assert ledger.settle_blame(WORLD, held) == []
    ledger.agree(asked, 0.0)
    if reported:
        finish(ledger, WORLD, trained)
    found = ledger.blame(WORLD, "the second was killed")
    if not reported:
        assert found == []
        found = ledger.settle_blame(WORLD, held)
    assert [(entry.shard, entry.losses) for entry in found] == [(deadly.shard, 2)]
    assert found[0].reason.endswith("the second was killed")
    if not reported:
        assert [each.shard for each in ledger.agree(asked, 0.0).held] == [trained.shard]
        finish(ledger, WORLD, trained)
    assert [shard.start for shard in rest(ledger, WORLD)] == [20, 30]
    assert ledger.check() == []


def test_a_shard_that_was_trained_is_not_in_quarantine_for_what_came_after_it() -> None:
    ledger = ShardLedger(in_order(40, max_losses=1))
    begun = ledger.agree(agreement(in_order(40)), 0.0)
    trained, deadly = grant(ledger, WORLD), grant(ledger, WORLD)
    standing = ShardStanding(ShardCheckpoint(in_order(40), begun.state))
    standing.granted(trained.shard, trained.token)
    standing.granted(deadly.shard, deadly.token)
    held = (claim(trained, 10), claim(deadly, 4))
    assert [entry.shard for entry in ledger.blame(WORLD, "killed")] == [trained.shard]
    assert [entry.shard for entry in ledger.settle_blame(WORLD, held)] == [deadly.shard]
    agreed = ledger.agree(agreement(in_order(40), held, state=standing.state), 0.0)
    assert [each.shard for each in agreed.held] == [trained.shard]
    assert [entry.shard for entry in ledger.quarantined()] == [deadly.shard]


def test_a_loss_is_settled_once_and_stays_where_the_shard_was_not_trained() -> None:
    ledger = ShardLedger(in_order(40, max_losses=2))
    ledger.agree(agreement(in_order(40)), 0.0)
    first, second = grant(ledger, WORLD), grant(ledger, WORLD)
    ledger.blame(WORLD, "killed")
    assert ledger.settle_blame(WORLD, (claim(first, 9), claim(second, 0))) == []
    assert ledger.settle_blame(WORLD, (claim(first, 10), claim(second, 0))) == []
    ledger.resume(WORLD, {first.token: 0, second.token: 0}, 0.0)
    assert [entry.shard for entry in ledger.blame(WORLD, "killed")] == [first.shard]


@given(st.integers(1, 70), st.integers(1, 9), st.booleans(), st.integers(0, 3), st.data())
def test_a_standing_follows_any_order_of_grants(
    records: int, size: int, shuffle: bool, seed: int, data: st.DataObject
) -> None:
    """Whatever was given to others meanwhile is to do for the world."""
    dataset = RangeDescription(records, size, epochs=2, shuffle=shuffle, seed=seed)
    everything = rest(ShardLedger(dataset))
    mine = data.draw(st.lists(st.sampled_from(everything), unique=True))
    standing = ShardStanding(ShardLedger(dataset).checkpoint())
    for token, shard in enumerate(mine, start=1):
        standing.granted(shard, token)
        standing.done(shard)
    again = ShardStanding.decoded(standing.encoded())
    ledger = ShardLedger(dataset)
    ledger.agree(agreement(dataset, state=again.state), 0.0)
    assert sorted(rest(ledger, WORLD)) == sorted(set(everything) - set(mine))
    assert ledger.counts().done_records == 2 * records
