"""A host whose link is slow is told from one that computes slowly, and from its neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.cluster_job import elasticrun_on
from tests.support.job import StepRecord

WIDTH = 25_000  # 2 MB of gradients a step


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.night
def test_the_host_with_the_slow_link_is_named_and_nobody_else(cluster: Cluster) -> None:
    with elasticrun_on(cluster, "-np", "4", "-H", "node[0-3]:1", width=WIDTH) as job:

        def last(records: list[StepRecord]) -> int:
            return max(r.step for r in records)

        def named() -> list[dict[str, Any]]:
            """By its network: on a busy machine one may well compute slowly, and be named."""
            return [event for event in job.events("rank_slow") if event["kind"] == "network"]

        begun = last(job.together(4))
        job.until(lambda: last(job.steps()) > begun + 100, "a hundred steps")
        assert named() == [], job.describe()
        cluster.node("node1").slow_link("50mbit")
        slowed_at = last(job.steps())
        event = job.until(lambda: next(iter(named()), None), "the host is named", within=90.0)
        print(f"named after {event['step'] - slowed_at} steps: {event['reason']}")
        assert event["host"] == "node1", job.describe()
        assert event["step"] - slowed_at <= 30
        cluster.node("node1").fast_link()
        job.until(
            lambda: any(e["kind"] == "network" for e in job.events("rank_recovered")),
            "it has recovered",
            within=90.0,
        )
        assert len(named()) == 1, job.describe()
