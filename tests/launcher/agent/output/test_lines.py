from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.output.lines import LineSplitter


def test_only_whole_lines_come_out_and_the_rest_at_the_end() -> None:
    lines = LineSplitter()
    assert lines.feed(b"one\ntw") == [b"one"]
    assert lines.feed(b"o\n\nthree") == [b"two", b""]
    assert lines.finish() == [b"three"]
    assert lines.finish() == []


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
    assert lines.progress() is None
    assert lines.feed(b" done\n") == [b"loading ... done"]
