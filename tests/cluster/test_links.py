"""A host whose link is slow is told from one that computes slowly, and from its neighbours."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster
from tests.support.cluster_job import elasticrun_on
from tests.support.job import StepRecord

WIDTH = 25_000  # 2 MB of gradients a step


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_host_with_the_slow_link_is_named_and_nobody_else(cluster: Cluster) -> None:
    with elasticrun_on(cluster, "-np", "4", "-H", "node[0-3]:1", width=WIDTH) as job:

        def last(records: list[StepRecord]) -> int:
            return max(r.step for r in records)

        begun = last(job.together(4))
        job.until(lambda: last(job.steps()) > begun + 100, "a hundred steps")
        assert job.events("rank_slow") == [], job.describe()
        cluster.node("node1").slow_link("50mbit")
        slowed_at = last(job.steps())
        event = job.until(
            lambda: next(iter(job.events("rank_slow")), None), "the host is named", within=90.0
        )
        print(f"named after {event['step'] - slowed_at} steps: {event['reason']}")
        assert (event["host"], event["kind"]) == ("node1", "network"), job.describe()
        assert event["step"] - slowed_at <= 30
        cluster.node("node1").fast_link()
        job.until(lambda: job.events("rank_recovered"), "it has recovered", within=90.0)
        assert len(job.events("rank_slow")) == 1, job.describe()
