"""The marks of the ranks of one round: when they are compared, who is asked, what is told."""

from __future__ import annotations

from elastic_driver.features.stragglers.states import (
    AGAIN_S,
    ALL_S,
    ANSWER_S,
    MAX_ASKED,
    OPEN_STEPS,
    Question,
    StateWatch,
    Told,
)
from elastic_driver.words.progress import StateMark
from elastic_driver.words.wire_events import LeafMark, StateDescribed


class Bench:
    """A watch over so many ranks, and a clock."""

    def __init__(self, size: int) -> None:
        self.watch, self.now = StateWatch(size), 100.0

    def mark(self, step: int, *digests: str | None) -> None:
        """Every rank that has a digest here marks this step."""
        for rank, digest in enumerate(digests):
            if digest is not None:
                self.watch.report(rank, (StateMark(step, digest),), self.now)

    def answer(self, rank: int, step: int, value: str | None) -> None:
        """A rank describes its state, which is one leaf; None: it has kept nothing."""
        leaves = () if value is None else (LeafMark("lr", f"d{value}", value),)
        event = StateDescribed(f"a.{rank}.1", 1, step, leaves, missing=value is None)
        self.watch.described(rank, event)

    def look(self, after: float = 0.0) -> Question | Told | None:
        self.now += after
        return self.watch.look(self.now)

    def reason(self, after: float = 0.0) -> str:
        """What is told now."""
        told = self.look(after)
        assert isinstance(told, Told)
        return f"{told.step}: {told.difference.reason}"


def test_a_step_that_all_ranks_have_marked_alike_is_equal_and_nobody_is_asked() -> None:
    bench = Bench(3)
    bench.mark(5, "aa", "aa", None)
    assert (bench.watch.equal_step, bench.look()) == (None, None), "rank 2 is late"
    bench.mark(5, None, None, "aa")
    assert (bench.watch.equal_step, bench.look(1000.0)) == (5, None)


def test_one_rank_of_each_kind_is_asked_and_the_difference_told_when_all_have_answered() -> None:
    bench = Bench(4)
    bench.mark(120, "aa", "aa", "bb", "aa")
    assert bench.look() == Question(120, (0, 2))
    bench.answer(0, 120, "0.02")
    assert bench.look(1.0) is None, "rank 2 has not answered yet"
    bench.answer(2, 120, "0.01")
    assert bench.reason() == "120: lr is 0.02 on ranks 0, 1, 3 and 0.01 on rank 2"


def test_all_ranks_get_the_time_of_a_heartbeat_to_mark_a_step_after_which_two_differ() -> None:
    bench = Bench(4)
    bench.mark(7, "aa", "bb", None, None)
    assert bench.look(ALL_S - 0.1) is None
    assert bench.look(0.2) == Question(7, (0, 1))
    bench.mark(7, None, None, "bb", None)
    bench.answer(0, 7, "1")
    bench.answer(1, 7, "2")
    assert bench.reason() == "7: lr is 1 on rank 0 and 2 on ranks 1, 2", "as far as it is known"


def test_the_earliest_step_that_differs_is_asked_about() -> None:
    bench = Bench(2)
    bench.mark(10, "aa", "aa")
    bench.mark(20, "bb", "cc")
    bench.mark(30, "dd", "ee")
    assert bench.watch.equal_step == 10
    assert bench.look() == Question(20, (0, 1))


def test_if_that_step_is_not_kept_any_more_the_newest_one_is_asked_about() -> None:
    bench = Bench(2)
    for step in (10, 20, 30):
        bench.mark(step, f"a{step}", f"b{step}")
    assert bench.look() == Question(10, (0, 1))
    bench.answer(0, 10, None)
    bench.answer(1, 10, None)
    assert bench.look() == Question(30, (0, 1))
    bench.answer(0, 30, None)
    bench.answer(1, 30, "7")
    assert bench.reason() == "30: rank 0 and rank 1 differ; where could not be read"


def test_a_rank_that_does_not_answer_is_waited_for_ten_seconds() -> None:
    bench = Bench(3)
    bench.mark(4, "aa", "bb", "cc")
    assert bench.look() == Question(4, (0, 1, 2))
    bench.answer(0, 4, "1")
    bench.answer(1, 4, "2")
    bench.answer(1, 3, "9")  # to another question
    assert bench.look(ANSWER_S - 0.1) is None
    known = "4: lr is 1 on rank 0 and 2 on rank 1"
    assert bench.reason(0.2) == f"{known}; what rank 2 holds is not known"


def test_at_most_eight_ranks_are_asked() -> None:
    bench = Bench(20)
    bench.mark(1, *(f"{rank:02d}" for rank in range(20)))
    asked = bench.look()
    assert isinstance(asked, Question)
    assert len(asked.ranks) == MAX_ASKED


def test_marks_that_are_repeated_or_late_change_nothing() -> None:
    bench = Bench(2)
    marks = tuple(StateMark(step, "aa") for step in range(1, 17))
    for _ in range(3):
        bench.watch.report(0, marks, bench.now)
        bench.watch.report(1, marks, bench.now)
    assert bench.watch.equal_step == 16
    bench.mark(16, "bb", None)
    assert bench.look(1000.0) is None


def test_the_same_leaf_is_told_once_a_round_and_others_after_a_pause() -> None:
    bench = Bench(2)
    bench.mark(1, "aa", "bb")
    assert bench.look() == Question(1, (0, 1))
    bench.answer(0, 1, "1")
    bench.answer(1, 1, "2")
    assert bench.reason() == "1: lr is 1 on rank 0 and 2 on rank 1"
    bench.mark(2, "cc", "dd")
    assert bench.look(AGAIN_S - 0.1) is None
    assert bench.look(0.2) == Question(2, (0, 1))
    bench.answer(0, 2, "1")
    bench.answer(1, 2, "2")
    assert bench.look() is None, "that is known"
    bench.mark(3, "ee", "ff")
    assert bench.look(AGAIN_S) == Question(3, (0, 1))
    for rank in (0, 1):
        leaves = (LeafMark("weight", str(rank), str(rank)),)
        bench.watch.described(rank, StateDescribed(f"a.{rank}.1", 1, 3, leaves))
    assert bench.reason() == "3: weight is 0 on rank 0 and 1 on rank 1"


def test_ranks_whose_scripts_have_ended_are_compared_and_not_asked() -> None:
    bench = Bench(3)
    bench.mark(9, "aa", "aa", "bb")
    for rank in range(3):
        bench.watch.ended(rank)
    assert bench.reason() == "9: ranks 0, 1 and rank 2 differ; where could not be read"


def test_what_ended_ranks_held_at_their_last_mark_is_told() -> None:
    bench = Bench(3)
    bench.mark(9, "aa", "aa", "bb")
    for rank, value in enumerate(("1", "1", "2")):
        bench.watch.ended(rank, (LeafMark("lr", f"d{value}", value),))
    assert bench.reason() == "9: lr is 1 on ranks 0, 1 and 2 on rank 2"


def test_what_ended_ranks_held_at_another_step_is_not_told() -> None:
    bench = Bench(2)
    bench.mark(9, "aa", "bb")
    bench.mark(10, None, "bb")
    for rank, value in enumerate(("1", "2")):
        bench.watch.ended(rank, (LeafMark("lr", f"d{value}", value),))
    assert bench.reason() == "9: rank 0 and rank 1 differ; where could not be read"


def test_another_rank_of_its_kind_is_asked_in_place_of_one_that_has_ended() -> None:
    bench = Bench(3)
    bench.mark(9, "aa", "aa", "bb")
    bench.watch.ended(0)
    assert bench.look() == Question(9, (1, 2))
    bench.answer(1, 9, "1")
    bench.watch.ended(2)
    assert "where could not be read" in bench.reason(), "nobody else can answer"


def test_a_rank_that_has_ended_without_a_mark_is_not_waited_for() -> None:
    bench = Bench(3)
    bench.watch.ended(2)
    bench.mark(9, "aa", "bb", None)
    assert bench.look() == Question(9, (0, 1))


def test_steps_that_some_ranks_never_mark_do_not_pile_up() -> None:
    bench = Bench(2)
    for step in range(3 * OPEN_STEPS):
        bench.mark(step, "aa", None)
    assert len(bench.watch._steps) == OPEN_STEPS
    bench.mark(1000, "aa", "aa")
    assert bench.watch.equal_step == 1000


def test_a_step_after_which_ranks_differ_is_not_dropped_for_later_ones() -> None:
    bench = Bench(3)
    bench.mark(1, "aa", "bb", None)
    for step in range(2, 3 * OPEN_STEPS):
        bench.mark(step, "aa", None, None)
    assert bench.look(ALL_S) == Question(1, (0, 1))


def test_buffers_that_were_alike_are_named_when_they_differ_and_others_never() -> None:
    bench = Bench(3)

    def mark(step: int, averages: tuple[int, ...]) -> None:
        for rank, average in enumerate(averages):
            buffers = f"{step * 8 + rank:08x}{average:08x}"  # a statistic, and an average
            bench.watch.report(rank, (StateMark(step, f"w{step}", buffers),), bench.now)

    for step in range(10):
        mark(step, (step,) * 3)
    assert (bench.watch.equal_step, bench.look(100.0)) == (9, None)
    for step in range(10, 13):
        assert bench.look(100.0) is None
        mark(step, (step, step, 99))
    assert bench.look() == Question(12, (0, 2))
    for rank in (0, 2):
        leaves = (
            LeafMark("model.weight", "w", "float32[2]"),
            LeafMark("buffers of 'model.norm'", f"n{rank}", "2 tensors"),
            LeafMark("buffers of 'ema'", f"e{rank}", "3 tensors"),
        )
        bench.watch.described(rank, StateDescribed(f"a.{rank}.1", 1, 12, leaves))
    assert bench.reason() == "12: buffers of 'ema' is not the same on ranks 0, 1 and rank 2"


def test_buffers_are_not_named_where_another_leaf_differs() -> None:
    bench = Bench(2)
    bench.mark(4, "aa", "bb")
    assert bench.look() == Question(4, (0, 1))
    for rank in (0, 1):
        own = LeafMark("buffers of 'model.norm'", f"n{rank}", "2 tensors")
        leaves = (own, LeafMark("lr", f"d{rank}", f"{rank}"))
        bench.watch.described(rank, StateDescribed(f"a.{rank}.1", 1, 4, leaves))
    assert bench.reason() == "4: lr is 0 on rank 0 and 1 on rank 1"


def test_alone_a_rank_is_equal_to_itself() -> None:
    bench = Bench(1)
    bench.mark(3, "aa")
    assert (bench.watch.equal_step, bench.look(100.0)) == (3, None)
