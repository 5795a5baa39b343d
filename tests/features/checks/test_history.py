"""What is remembered of many checks, and what of it people are told."""

from __future__ import annotations

import msgspec
import pytest

from elastic_driver.features.checks import report as history
from elastic_driver.features.checks.evidence import Measurement, NodeVerdict, Verdict, failed
from elastic_driver.features.checks.report import CheckHistory, CheckReport, PastCheck, remark

GOOD, SLOW, BAD = Verdict.GOOD, Verdict.STRAGGLER, Verdict.FAULTY


def report(**verdicts: Verdict) -> CheckReport:
    nodes = [
        NodeVerdict(name, verdict, "" if verdict is GOOD else "why", 0.5, 0.1, (times(name),))
        for name, verdict in verdicts.items()
    ]
    return CheckReport(rounds=1, seconds=2.0, nodes=tuple(nodes))


def times(name: str) -> Measurement:
    return Measurement(name, 0.5, 0.1)


def played(*verdicts: Verdict) -> CheckHistory:
    kept = CheckHistory()
    for number, verdict in enumerate(verdicts):
        kept = kept.with_report(report(n1=verdict), 1000.0 + number)
    return kept


def test_each_check_adds_a_line_to_each_of_its_nodes() -> None:
    kept = (
        CheckHistory().with_report(report(n1=GOOD, n2=SLOW), 1.0).with_report(report(n2=BAD), 2.0)
    )
    assert kept.nodes == {
        "n1": (PastCheck(1.0, GOOD, "", 0.5, 0.1),),
        "n2": (PastCheck(1.0, SLOW, "why", 0.5, 0.1), PastCheck(2.0, BAD, "why", 0.5, 0.1)),
    }
    assert msgspec.json.decode(msgspec.json.encode(kept), type=CheckHistory) == kept


def test_only_so_many_checks_and_nodes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = played(*[SLOW] * 5, *[GOOD] * history.KEPT)
    assert [check.verdict for check in kept.nodes["n1"]] == [GOOD] * history.KEPT
    monkeypatch.setattr(history, "MOST_NODES", 2)
    kept = kept.with_report(report(n2=GOOD, n3=GOOD), 9000.0)
    assert set(kept.nodes) == {"n2", "n3"}, "the one checked longest ago is forgotten"


def test_a_node_that_was_not_checked_leaves_no_trace_and_one_that_never_came_up_does() -> None:
    nodes = (
        NodeVerdict("n1", Verdict.UNDECIDED, "it was not checked", None, None, ()),
        NodeVerdict("n2", BAD, "its agent did not come up", None, None, ()),
    )
    kept = CheckHistory().with_report(CheckReport(rounds=0, seconds=1.0, nodes=nodes), 1.0)
    assert set(kept.nodes) == {"n2"}


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ((), ""),
        ((GOOD,) * 9, ""),
        ((SLOW,), "before: straggler in 1 of its last check"),
        ((GOOD, SLOW, GOOD, SLOW, SLOW), "before: straggler in 3 of its last 5 checks"),
        ((BAD, SLOW, GOOD, GOOD, SLOW, BAD), "before: straggler in 2, faulty in 1 of its last 5 "),
        ((SLOW, *[GOOD] * 5), ""),
    ],
)
def test_the_remark_counts_the_last_checks(verdicts: tuple[Verdict, ...], words: str) -> None:
    said = remark(played(*verdicts).nodes.get("n1", ()))
    assert said.startswith(words)
    assert bool(said) is bool(words)


def test_the_report_tells_what_earlier_checks_found() -> None:
    now = report(n1=SLOW, n2=GOOD)
    before = played(SLOW, GOOD).remarks(now)
    shown = msgspec.structs.replace(now, before=before).render().splitlines()
    assert shown[1].endswith("why; before: straggler in 1 of its last 2 checks")
    assert shown[2].endswith("ms")


@pytest.mark.parametrize(
    ("compute", "network", "checks", "task", "said"),
    [
        (1.0, 0.2, 3, "", ""),
        (1.01, 0.3, 3, "", "computing takes 2.0 times what it took before; network takes 3.0 "),
        (9.0, 9.0, 2, "", ""),
        (9.0, 9.0, 3, "another task", ""),
    ],
)
def test_a_node_that_is_far_slower_than_it_was_is_remarked_on(
    compute: float, network: float, checks: int, task: str, said: str
) -> None:
    found = NodeVerdict("n1", GOOD, "", compute, network, (times("n1"),))
    now = CheckReport(rounds=1, seconds=1.0, nodes=(found,), task=task)
    words = played(*[GOOD] * checks).remarks(now).get("n1", "")
    assert words.startswith(said)
    assert bool(words) is bool(said)


def test_the_history_is_a_table() -> None:
    broken = NodeVerdict("n2", BAD, "failed alone", None, None, (failed("n2", "it"),))
    kept = played(GOOD, SLOW, GOOD).with_report(
        CheckReport(rounds=1, seconds=1.0, nodes=(broken,)), 86400.0
    )
    assert kept.render(["n1", "n2", "n3"]).splitlines() == [
        "node  last check         checks  good  straggler  faulty  undecided  compute  network",
        "n1    1970-01-01 00:16Z       3     2          1       –          –   500 ms   100 ms",
        "n2    1970-01-02 00:00Z       1     –          –       1          –        –        –"
        "  faulty: failed alone",
        "n3    never                   0     –          –       –          –        –        –",
    ]
