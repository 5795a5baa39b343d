"""Verdicts by value: small clusters played by hand, each fault known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.features.checks.evidence import Measurement, NodeCheck, Verdict, failed


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24), st.data())
def test_a_check_ends_in_time_and_never_calls_a_node_faulty_that_never_failed(
    count: int, data: st.DataObject
) -> None:
    check = NodeCheck([str(n) for n in range(count)])
    ever_failed: set[str] = set()
    while groups := check.plan():
        assert len(check.rounds) < check.round_limit
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
        measurements = []
        for group in groups:
            passed = data.draw(st.booleans())
            for node in group:
                seconds = data.draw(st.sampled_from([1.0, 1.5, 9.0]))
                result = Measurement(node, seconds, seconds) if passed else failed(node, "x")
                measurements.append(result)
            if not passed:
                ever_failed.update(group)
        check.report(measurements)
    for verdict in check.verdicts():
        if verdict.verdict is Verdict.FAULTY:
            assert verdict.node in ever_failed
        if verdict.verdict is Verdict.STRAGGLER:
            assert verdict.compute == 9.0 or verdict.network == 9.0
