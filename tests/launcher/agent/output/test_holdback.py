from __future__ import annotations

from launcher.agent.output.holdback import AGAIN_S, ALIVE_S, LONGEST_S, MAX_BYTES, QUIET_S, HoldBack

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
