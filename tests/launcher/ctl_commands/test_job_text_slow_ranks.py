"""`elasticctl status` of a job that has a slow rank."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.ctl_commands import job_text as show


def document(slow: list[dict[str, Any]]) -> show.JobDocument:
    """Two workers training, of which some are slow."""
    members = [
        {
            "worker": f"{host}.0.1",
            "host": host,
            "slot": 0,
            "rank": rank,
            "state": "running",
            "pid": 100 + rank,
            "version": 0,
            "leaving": "the job shrinks" if rank == 2 else "",
        }
        for rank, host in enumerate("abc")
    ]
    numbers = dict.fromkeys(
        ("failures", "fruitless", "fruitless_restarts", "resets", "restart_count"), 0
    )
    limits = {"max_restarts": None, "reset_limit": None, "ignored_events": 0}
    job = {
        "run_id": "r",
        "endpoint": "e",
        "started": 0.0,
        "state": "running",
        "kind": "elastic",
        "reason": "",
        "exit_code": None,
        "ignored": "",
        "round": 1,
        "round_state": "complete",
        "size": 3,
        "wanted": 3,
        "min_np": 1,
        "max_np": 3,
        "members": members,
        "hosts": [],
        "counters": {**numbers, **limits},
        "slow": slow,
    }
    return show.read_job(msgspec.json.encode(job))


def test_a_slow_rank_is_marked_as_such() -> None:
    slow = {"rank": 1, "host": "b", "worker": "b.0.1", "kind": "compute", "ratio": 4.21, "step": 9}
    _, first, second, third = show.workers(document([slow])).splitlines()
    assert first.endswith("a.0.1")
    assert second.endswith("b.0.1   slow in compute: 4.2 times the usual")
    assert third.endswith("leaves: the job shrinks")


def test_without_slow_ranks_nobody_is_marked() -> None:
    assert "slow" not in show.workers(document([]))
