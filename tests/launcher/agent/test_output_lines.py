from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.agent.output import (
    AGAIN_S,
    ALIVE_S,
    LONGEST_S,
    MAX_BYTES,
    QUIET_S,
    HoldBack,
    LineSplitter,
)


def test_only_whole_lines_come_out_and_the_rest_at_the_end() -> None:
    lines = LineSplitter()
    assert lines.feed(b"one\ntw") == [b"one"]
    assert lines.feed(b"o\n\nthree") == [b"two", b""]
    assert lines.finish() == [b"three"]
    assert lines.finish() == []


@example(b"aa\r\r\r\n", [5])
@given(
    st.lists(st.sampled_from(b"ab\r\n"), max_size=60).map(bytes),
    st.lists(st.integers(0, 60)),
)
def test_where_the_pipe_cuts_the_bytes_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    whole = LineSplitter()
    expected = whole.feed(data) + whole.finish()
    pieces = LineSplitter()
    ends = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    got: list[bytes] = []
    for start, end in itertools.pairwise(ends):
        got += pieces.feed(data[start:end])
    assert got + pieces.finish() == expected


@given(st.binary(max_size=200).filter(lambda data: b"\r" not in data))
def test_nothing_is_lost_of_a_stream_without_carriage_returns(data: bytes) -> None:
    lines = LineSplitter(max_line=1000)
    out = b"\n".join([*lines.feed(data), *lines.finish()])
    assert out == data.removesuffix(b"\n")


def test_a_long_line_comes_in_pieces_and_memory_stays_bounded() -> None:
    lines = LineSplitter(max_line=10)
    assert lines.feed(b"a" * 25 + b"\nb\n") == [b"a" * 10, b"a" * 10, b"a" * 5, b"b"]
    assert b"".join(lines.feed(b"c" * 35)) == b"c" * 35  # without waiting for its end


@pytest.mark.parametrize("text", [b"10%\r20%\r30%\n", b"\r10%\r20%\r30%\n", b"30%\r\n"])
def test_a_finished_progress_bar_is_one_line(text: bytes) -> None:
    assert LineSplitter().feed(text) == [b"30%"]


def test_a_progress_bar_shows_its_newest_state_when_asked_and_never_the_same_twice() -> None:
    lines = LineSplitter()
    assert lines.feed(b"\r10%") == []
    assert lines.has_progress()
    assert lines.progress() == b"10%"
    assert lines.progress() is None
    for n in range(1000):
        assert lines.feed(b"\r%d%%" % n) == []
    assert lines.progress() == b"999%"
    assert lines.feed(b"\n") == []  # was shown like that already
    assert lines.feed(b"next\n") == [b"next"]


def test_a_plain_unfinished_line_is_no_progress_bar() -> None:
    lines = LineSplitter()
    lines.feed(b"loading ...")
    assert not lines.has_progress()
    assert lines.waits()
    assert lines.progress() is None
    assert lines.feed(b" done\n") == [b"loading ... done"]


TRACE = [b"Traceback (most recent call last):", b'  File "x.py", line 1', b"ValueError: no"]
SYNTAX = [b'  File "/x/y.py", line 3', b"    def (", b"SyntaxError: invalid syntax"]


def test_ordinary_lines_pass_at_once() -> None:
    hold = HoldBack()
    lines = [b"epoch 1", b'loaded File "x", line 3', b"  File is missing"]
    assert hold.feed(lines, 0.0) == lines
    assert hold.due() is None


def test_everything_from_a_traceback_on_is_held_until_released() -> None:
    hold = HoldBack()
    assert hold.feed([b"before", *TRACE], 0.0) == [b"before"]
    assert hold.feed([b"after"], 0.1) == []
    assert hold.release() == [*TRACE, b"after"]
    assert hold.feed([b"later"], 0.2) == [b"later"]


def test_a_syntax_error_has_no_heading_and_is_held_too() -> None:
    hold = HoldBack()
    assert hold.feed(SYNTAX, 0.0) == []
    assert hold.release() == SYNTAX


def test_it_is_due_after_quiet_and_sooner_after_a_sign_of_life() -> None:
    hold = HoldBack()
    hold.feed(TRACE, 10.0)
    assert hold.due() == 10.0 + QUIET_S
    hold.feed([b"more"], 10.5)
    assert hold.due() == 10.5 + QUIET_S
    hold.see_alive(10.6)
    assert hold.due() == 10.6 + ALIVE_S
    hold.feed([b"more"], 10.7)
    assert hold.due() == 10.7 + ALIVE_S
    hold.release()
    hold.feed(TRACE, 20.0)
    assert hold.due() == 20.0 + QUIET_S


def test_it_can_be_extended_for_a_busy_process_but_not_for_ever() -> None:
    hold = HoldBack()
    hold.feed(TRACE, 10.0)
    assert hold.extend(11.0)
    assert hold.due() == 11.0 + AGAIN_S
    hold.feed([b"more"], 10.0 + LONGEST_S - 0.1)
    assert hold.due() == 10.0 + LONGEST_S
    assert not hold.extend(10.0 + LONGEST_S)


def test_what_is_held_is_bounded() -> None:
    hold = HoldBack()
    assert hold.feed(TRACE, 0.0) == []
    assert len(hold.feed([b"x" * MAX_BYTES], 0.1)) == len(TRACE) + 1
    assert hold.due() is None


def test_a_traceback_that_torch_marked_with_its_rank_is_held_too() -> None:
    hold = HoldBack()
    marked = [b"[rank1]: " + line for line in TRACE]
    assert hold.feed(marked, 0.0) == []
    assert hold.release() == marked
