"""A check's report as people and programs read it."""

from __future__ import annotations

import msgspec

from elastic_driver.features.checks.evidence import Measurement, NodeVerdict, Verdict, failed
from elastic_driver.features.checks.report import CheckReport, shown_times


def node(name: str, verdict: Verdict, reason: str = "", **measured: float) -> NodeVerdict:
    if verdict is Verdict.FAULTY:
        return NodeVerdict(name, verdict, reason, None, None, (failed(name, "broken"),))
    history = (Measurement(name, 0.25, 1.5, **measured),)  # type: ignore[arg-type]
    return NodeVerdict(name, verdict, reason, 0.25, 1.5, history)


REPORT = CheckReport(
    rounds=2,
    seconds=3.21,
    task_seconds=1.5,
    nodes=(
        node("n1", Verdict.GOOD, bandwidth=2.5e9, latency=2e-5),
        node("node-two", Verdict.FAULTY, "failed alone: broken"),
        node("n3", Verdict.STRAGGLER, "computing takes 9 s"),
        node("n4", Verdict.UNDECIDED, "failed, and nobody could tell"),
    ),
)


def test_the_table_has_a_line_for_each_node_and_a_summary() -> None:
    assert REPORT.render().splitlines() == [
        "node      verdict    compute  network  bandwidth  latency",
        "n1        good        250 ms   1.50 s   2.5 GB/s  0.02 ms",
        "node-two  faulty           –        –          –        –  failed alone: broken",
        "n3        straggler   250 ms   1.50 s          –        –  computing takes 9 s",
        "n4        undecided   250 ms   1.50 s          –        –  failed, and nobody could tell",
        "node check: 1 good, 1 straggler (n3), 1 faulty (node-two), 1 undecided (n4); "
        "2 rounds, 3.2 s, of which the task 1.5 s",
    ]


def test_bandwidth_is_shown_only_where_it_was_measured() -> None:
    report = CheckReport(rounds=1, seconds=0.5, nodes=(node("a", Verdict.GOOD),))
    assert report.render().splitlines() == [
        "node  verdict  compute  network",
        "a     good      250 ms   1.50 s",
        "node check: 1 good; 1 round, 0.5 s, of which the task 0.0 s",
    ]


def test_many_names_are_cut_short() -> None:
    nodes = tuple(node(f"n{i}", Verdict.FAULTY, "x") for i in range(20))
    summary = CheckReport(rounds=3, seconds=1.0, nodes=nodes).summary()
    assert "20 faulty (n0, n1, n2, n3, n4, n5, n6, n7 and 12 more)" in summary


def test_only_the_faulty_are_excluded_and_on_request_the_slow_but_never_the_undecided() -> None:
    assert list(REPORT.excluded(stragglers=False)) == ["node-two"]
    assert list(REPORT.excluded(stragglers=True)) == ["node-two", "n3"]


def test_a_report_survives_being_written_down() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=CheckReport) == REPORT


def test_an_exchange_within_a_network_stack_is_shown_though_it_is_not_judged() -> None:
    history = (Measurement("a", 0.25, 0.002, linked=False),)
    found = NodeVerdict("a", Verdict.GOOD, "", 0.25, None, history)
    report = CheckReport(rounds=1, seconds=0.5, nodes=(found,))
    assert report.render().splitlines()[1].split()[-2:] == ["2", "ms"]


def test_the_times_of_a_round_are_shown_for_people() -> None:
    assert shown_times(Measurement("n1", 0.04, 1.5)) == "n1 40 ms computing, 1.50 s network"
    assert shown_times(Measurement("n1", 0.04, 0.0)) == "n1 40 ms computing, – network"
    assert shown_times(failed("n1", "exit code 1")) == "n1 failed (exit code 1)"
