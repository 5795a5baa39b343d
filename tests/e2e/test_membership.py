"""Hosts come and go by the discovery script's word; sizes and ranks follow, order is kept."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tests.support.job import (
    JOBS,
    Hosts,
    StepRecord,
    assert_no_step_lost_or_repeated,
    elasticrun,
    is_running,
)

TRAIN = str(JOBS / "train.py")
ENV = {"STEPS": "100000"}


def hosts_of(live: dict[int, StepRecord]) -> list[str]:
    """Host of each rank, in rank order."""
    return [r.worker.rsplit(".", 2)[0] for r in sorted(live.values(), key=lambda r: r.rank)]


def discovery(hosts: Hosts, *more: str, start: int = 2) -> tuple[str, ...]:
    return (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", str(start), "--min-np", "1", *more, "--", TRAIN),
    )


def test_an_added_host_joins_and_a_removed_one_leaves_at_a_step_boundary(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    with elasticrun(*discovery(hosts), env=ENV) as job:
        first = job.until_size(2)
        hosts.set("localhost:2", "127.0.0.2:1")
        grown = job.until_size(3)
        assert set(first) <= set(grown)
        assert hosts_of(grown) == ["localhost", "localhost", "127.0.0.2"]
        for pid, record in first.items():
            assert grown[pid].rank == record.rank
        hosts.set("localhost:2")
        shrunk = job.until_size(2)
        assert set(shrunk) == set(first)
        newcomer = (set(grown) - set(first)).pop()
        job.until(lambda: not is_running(newcomer), "the removed host's worker is gone")
        assert_no_step_lost_or_repeated(job, min(r.step for r in shrunk.values()))
        # Planned changes are boundaries: every rank's last step of a round is the same one.
        for number in {r.round for r in job.steps()} - {max(r.round for r in job.steps())}:
            ends: dict[int, int] = {}
            for record in job.steps():
                if record.round == number:
                    ends[record.pid] = record.step
            assert len(set(ends.values())) == 1, f"round {number} ended at {ends}"
        assert not job.events("host_blacklisted")


def test_rank_0s_host_is_removed_and_the_next_oldest_takes_over(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1", "127.0.0.2:1", "127.0.0.3:1")
    with elasticrun(*discovery(hosts, "--max-np", "3", start=3), env=ENV) as job:
        first = job.until_size(3)
        assert hosts_of(first) == ["localhost", "127.0.0.2", "127.0.0.3"]
        hosts.set("127.0.0.2:1", "127.0.0.3:1")
        after = job.until_size(2)
        assert hosts_of(after) == ["127.0.0.2", "127.0.0.3"]
        assert set(after) < set(first)
        assert_no_step_lost_or_repeated(job, min(r.step for r in after.values()))


def test_all_hosts_are_replaced_one_after_the_other_without_losing_a_step(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "127.0.0.2:1", "127.0.0.3:1")
    with elasticrun(*discovery(hosts, "--max-np", "3"), env=ENV) as job:
        first = job.until_size(2)
        hosts.set("127.0.0.2:1", "127.0.0.3:1", "127.0.0.4:1")
        job.until_size(3)
        hosts.set("127.0.0.3:1", "127.0.0.4:1")
        job.until_size(2)
        hosts.set("127.0.0.3:1", "127.0.0.4:1", "127.0.0.5:1")
        job.until_size(3)
        hosts.set("127.0.0.4:1", "127.0.0.5:1")
        last = job.until_size(2)
        assert hosts_of(last) == ["127.0.0.4", "127.0.0.5"]
        assert not set(first) & set(last)
        assert_no_step_lost_or_repeated(job, min(r.step for r in last.values()))


def test_max_np_leaves_extra_slots_unused_until_one_is_needed(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1", "127.0.0.2:1", "127.0.0.3:1")
    with elasticrun(*discovery(hosts, "--max-np", "2"), env=ENV) as job:
        first = job.until_size(2)
        assert hosts_of(first) == ["localhost", "127.0.0.2"]
        assert "127.0.0.3" not in [e["host"] for e in job.events("worker_started")]
        hosts.set("localhost:1", "127.0.0.3:1")
        job.until(
            lambda: hosts_of(job.until_size(2)) == ["localhost", "127.0.0.3"], "the spare took over"
        )


def test_below_min_np_the_job_waits_and_goes_on_when_a_host_comes(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1", "127.0.0.2:1")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--min-np", "2", "--", TRAIN),
    )
    with elasticrun(*args, env=ENV) as job:
        first = job.until_size(2)
        hosts.set("localhost:1")
        gone = next(p for p, r in first.items() if r.worker.startswith("127.0.0.2"))
        job.until(lambda: not is_running(gone), "the removed host's worker is gone")
        steps = max(r.step for r in job.steps())
        hosts.set("localhost:1", "127.0.0.3:1")
        again = job.until_size(2)
        assert hosts_of(again) == ["localhost", "127.0.0.3"]
        assert all(r.size == 2 for r in job.steps()), "nobody trained below min-np"
        assert min(r.step for r in again.values()) > steps


def test_a_host_that_flaps_between_two_reads_of_the_discovery_changes_nothing(
    tmp_path: Path,
) -> None:
    hosts, lock, reads = (
        Hosts(tmp_path, "localhost:1", "127.0.0.2:1"),
        tmp_path / "lock",
        tmp_path / "reads",
    )
    lock.touch()
    reads.touch()
    # The lock keeps a read from falling between the two halves of a flap.
    hosts.script.write_text(
        f"#!/bin/sh\nflock -s '{lock}' cat '{hosts.listing}'\necho >> '{reads}'\n"
    )
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--", TRAIN),
    )
    with elasticrun(*args, env=ENV) as job:
        first = job.until_size(2)
        round_before = max(r.round for r in job.steps())
        for _ in range(3):
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                hosts.set("localhost:1")
                hosts.set("localhost:1", "127.0.0.2:1")
                done = reads.stat().st_size
            job.until(lambda seen=done: reads.stat().st_size > seen + 1, "it is read afterwards")
        reached = max(r.step for r in job.steps())
        job.until(lambda: max(r.step for r in job.steps()) > reached + 50, "training goes on")
        assert set(job.live()) == set(first)
        assert max(r.round for r in job.steps()) == round_before
        assert not job.events("host_removed", "host_blacklisted")
        # The same host, gone for a whole read: that is seen.
        hosts.set("localhost:1")
        job.until(lambda: job.events("host_removed"), "the driver reads this script")
