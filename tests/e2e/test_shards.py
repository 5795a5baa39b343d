"""Shards from the driver: workers die, and every record is trained once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun

SHARDS = str(JOBS / "shards.py")
THREE = ("-np", "3", "--min-np", "1", "--", SHARDS)


def result_of(job: RunningJob) -> Any:
    assert job.wait(90) == 0, job.describe()
    line = next(line for line in job.stdout.splitlines() if "result {" in line)
    return json.loads(line[line.index("{") :])


def kill_twice(job: RunningJob) -> None:
    members = job.until_size(3, steps=3)
    job.kill(min(members, key=lambda pid: members[pid].rank))  # who speaks with the driver
    members = job.until_size(3, steps=3)
    job.kill(max(members, key=lambda pid: members[pid].rank))


@pytest.mark.slow
@pytest.mark.parametrize("loaders", ["0", "1"])
def test_two_kills_leave_no_record_out_and_repeat_none_but_the_padding(loaders: str) -> None:
    with elasticrun(*THREE, env={"MODE": "together", "LOADERS": loaders}) as job:
        kill_twice(job)
        result = result_of(job)
        assert len(job.rounds()) >= 3
    assert result["least"] == 2, result
    assert result["extra"] == result["replayed"], result
    assert (result["done"], result["open"]) == (3000, 0), "the driver counts the same"


@pytest.mark.slow
def test_a_record_that_kills_is_left_out_by_the_name_of_its_shard() -> None:
    # Of three workers one is left that has the state, however long replacements take.
    env = {"MODE": "together", "POISON": "700", "RECORDS": "1000", "MAX_LOSSES": "2"}
    with elasticrun(*THREE, env=env) as job:
        result = result_of(job)
        quarantined = job.events("shard_quarantined")
    assert [e["dataset"] for e in quarantined] == ["records"]
    assert "records 640–703" in quarantined[0]["shard"]
    assert "records 640–703" in result["missing"]
    assert result["least"] == 0
    assert result["done"] == 2 * (1000 - 64), result


@pytest.mark.slow
def test_workers_that_train_apart_take_over_a_killed_ones_shards() -> None:
    with elasticrun(*THREE, env={"MODE": "apart"}) as job:
        members = job.until_size(3, steps=3)
        job.kill(max(members, key=lambda pid: members[pid].rank))
        result = result_of(job)
    assert (result["done"], result["open"], result["missing"]) == (3000, 0, "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["together", "apart"])
def test_shards_go_on_with_the_drivers_that_follow_a_killed_one(mode: str) -> None:
    with elasticrun(*THREE, env={"MODE": mode}) as job:
        for steps in (3, 20):
            job.until_size(3, steps=steps)
            job.kill_driver()
            job.start("--resume")
        result = result_of(job)
        assert len(job.events("driver_resumed")) == 2
        job.assert_nothing_left()
    assert (result["done"], result["open"], result["missing"]) == (3000, 0, "")
    if mode == "together":
        assert result["least"] == 2, result
        assert result["extra"] == result["replayed"], result
