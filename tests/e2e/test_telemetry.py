"""A real job sends its trace to a collector, across a kill."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tests.support.collector import attributes, collector
from tests.support.job import JOBS, elasticrun

TRAIN = str(JOBS / "train.py")


def test_a_recovery_is_a_span_that_begins_with_the_loss_and_ends_with_a_step() -> None:
    with collector() as kept:
        env = {"STEPS": "150", "STEP_MS": "20", "OTEL_EXPORTER_OTLP_ENDPOINT": kept.url}
        env["OTEL_EXPORTER_OTLP_TIMEOUT"] = "60"  # the machine may be busy
        with elasticrun("-np", "2", "--min-np", "1", "--", TRAIN, env=env) as job:
            members = job.until_size(2, steps=10)
            victim = max(members, key=lambda pid: members[pid].rank)
            job.kill(victim)
            assert job.wait(120) == 0, job.describe()
            lost = next(e for e in job.events("worker_exited") if e["exit_code"] == -9)
            steps = [r for r in job.steps() if r.round == 2]
    spans, (whole,) = kept.spans("round"), kept.spans("job")
    recovery = next(span for span in spans if attributes(span)["elastic.round"] == 2)
    assert attributes(recovery)["elastic.losses"] == 1
    assert {"worker_exited", "round_completed"} <= {e.name for e in recovery.events}
    began, ended = recovery.start_time_unix_nano / 1e9, recovery.end_time_unix_nano / 1e9
    assert began == pytest.approx(lost["t"], abs=0.05) or began < lost["t"]
    assert ended >= min(record.t for record in steps) - 0.05
    assert whole.status.code == 0
    assert {span.trace_id for span in spans} == {whole.trace_id}
