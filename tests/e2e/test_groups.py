"""`elastic.local_group()` and `elastic.cross_group()` in a real job of two hosts."""

from __future__ import annotations

import json

from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, elasticrun

GROUPS = str(JOBS / "groups.py")


def groups_of(job: RunningJob, round_id: int, size: int) -> list[dict[str, list[int]]]:
    """Return the groups that each rank met in this round."""
    files = [job.folder / "steps" / f"groups.{round_id}.{rank}" for rank in range(size)]
    return [json.loads(file.read_text()) for file in files]


def test_groups_of_a_host_and_across_hosts_follow_the_world() -> None:
    hosts = ("-H", "127.0.0.2:2,127.0.0.3:2", "-np", "4", "--min-np", "1")
    with elasticrun(*hosts, "--", GROUPS, env={"STEPS": "100000"}) as job:
        live = job.until_size(4)
        first = max(record.round for record in live.values())
        met = groups_of(job, first, 4)
        assert [m["local"] for m in met] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert [m["cross"] for m in met] == [[0, 2], [1, 3], [0, 2], [1, 3]]
        job.kill(next(pid for pid, record in live.items() if record.rank == 1))
        later = job.until_size(4)
        second = max(record.round for record in later.values())
        assert second > first
        met = groups_of(job, second, 4)
        assert sorted(map(len, (m["local"] for m in met))) == [2, 2, 2, 2]
        assert sorted(map(len, (m["cross"] for m in met))) == [2, 2, 2, 2]
        assert_no_step_lost_or_repeated(job, min(r.step for r in later.values()))
