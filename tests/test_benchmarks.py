"""The benchmarks run with the product as it is, and take ratios within their turns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.common import OURS, Figure, gather, report
from tests.support.job import ROOT


def test_a_ratio_is_taken_within_each_turn_of_the_medians_in_it() -> None:
    ours, theirs = gather(
        [
            *((OURS, "kill", turn, seconds) for turn, seconds in ((0, 1.0), (0, 3.0), (1, 10.0))),
            *(("peer", "kill", turn, seconds) for turn, seconds in ((0, 4.0), (1, 30.0), (2, 9.0))),
        ]
    )
    assert ours.by_turn() == {0: 2.0, 1: 10.0}
    assert theirs.ratios(ours) == [2.0, 3.0]


def test_only_figures_of_one_name_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    report(
        "trial",
        [
            Figure(OURS, "next step", "s", (1.0, 1.0)),
            Figure(OURS, "full size", "s", (2.0, 2.0)),
            Figure("peer", "full size", "s", (6.0, 8.0)),
            Figure("peer", "another event", "s", (6.0, 8.0)),
        ],
    )
    rows = {line[:30].strip(): line for line in capsys.readouterr().out.splitlines()[2:]}
    compared = [row for row in rows.values() if "× ours" in row]
    assert len(compared) == 1
    assert "full size" in compared[0]
    assert "3.5 (3 … 4) × ours, turns=2" in compared[0]


@pytest.mark.slow
def test_real_workers_and_simulated_members_meet_at_a_driver() -> None:
    few = ("--members", "3", "--simulated", "4,8", "--idle", "0", "--turns", "1")
    argv = [sys.executable, "-m", "benchmarks.meeting", *few, "--agents-most", "0"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "n members know ranks and peers, n = 3" in done.stdout
    assert "8 : 4" in done.stdout
