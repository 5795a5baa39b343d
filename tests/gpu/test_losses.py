"""Peers are lost at bad moments: while groups connect, while a state travels, with the driver."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.gpu.conftest import JOBS, ON_CPU, START_S, Note, Run, why_not
from tests.gpu.watching import assert_equal_everywhere, event_after, next_step_of, seconds
from tests.support.job import Hosts, assert_no_step_lost_or_repeated
from tests.support.processes import is_running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

TRAIN = str(JOBS / "train.py")
AFTER_S = (0.0, 0.03, 0.06, 0.09)  # of a second kill, after a round was formed
FROZEN_MB = "512" if ON_CPU else "3072"


def test_a_peer_that_dies_while_the_others_connect(run: Run, note: Note) -> None:
    took = []
    with run("-np", "4", "--min-np", "1", "--", TRAIN, NEWCOMERS_WAIT="0.5") as job:
        for after in AFTER_S:
            members = job.until_size(4, START_S, steps=5)
            first, second, *rest = sorted(members, reverse=True)
            killed_at = job.kill(first)
            formed = event_after(job, "round_completed", killed_at)
            time.sleep(max(0.0, formed["t"] + after - time.time()))
            again_at = job.kill(second)
            took.append(next_step_of(job, set(rest), again_at))
            assert all(is_running(pid) for pid in rest), job.describe()
        job.until_size(4, START_S, steps=11)
        note(f"killed {AFTER_S} s after a round is formed: next step", seconds(took))
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


@pytest.mark.parametrize("lost", ["source", "receiver"])
def test_a_peer_that_dies_while_a_state_travels(
    run: Run, note: Note, tmp_path: Path, lost: str
) -> None:
    """Of two holders one sends to two newcomers; the other one must keep the state."""
    hosts = Hosts(tmp_path, "localhost:2")
    discovery = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2")
    args = (*discovery, "-np", "2", "--min-np", "1", "--max-np", "4", "--", TRAIN)
    with run(*args, FROZEN_MB=FROZEN_MB) as job:
        holders = job.until_size(2, START_S, steps=5)
        hosts.set("localhost:4")
        began = time.time()
        while (formed := event_after(job, "round_completed", began))["size"] < 4:
            began = formed["t"]
        newcomers = {e["pid"] for e in job.events("worker_started")} - set(holders)
        marks = [job.folder / f"arrives-{pid}" for pid in newcomers]
        job.until(lambda: all(mark.exists() for mark in marks), "the state is under way", START_S)
        source = min(holders, key=lambda pid: holders[pid].rank)
        victim = source if lost == "source" else max(newcomers)
        killed_at = job.kill(victim)
        arrived = [e for e in job.events("state_synced") if formed["t"] < e["t"] < killed_at]
        assert not arrived, "the kill came too late"
        kept = set(holders) - {victim}
        took = next_step_of(job, kept, killed_at)
        job.until_size(4, START_S, steps=11)
        assert all(is_running(pid) for pid in kept), job.describe()
        under_way = killed_at - formed["t"]
        note("a state is under way, after its round was formed", f"{under_way:.2f} s")
        note(f"{lost} of {FROZEN_MB} MiB lost on the way: next step", f"{took:.2f} s")
        note("… four train", f"{time.time() - killed_at:.2f} s")
        sent = [f"{e['seconds']:.2f} s to {e['receivers']}" for e in job.events("state_synced")]
        note("… transfers", ", ".join(sent))
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


def test_a_driver_and_a_worker_killed_together(run: Run, note: Note) -> None:
    took = []
    args = ("-np", "3", "--min-np", "1", "--driver-timeout", "60", "--", TRAIN)
    with run(*args, WIDTH="1024") as job:
        for resumed in (1, 2):
            pids = set(job.until_size(3, START_S, steps=5))
            victim = max(pids)
            killed_at = job.kill(victim)
            job.kill_driver()
            job.start("--resume")
            job.until(lambda n=resumed: len(job.events("driver_resumed")) == n, "the next driver")
            took.append(next_step_of(job, pids - {victim}, killed_at))
            assert all(is_running(pid) for pid in pids - {victim}), job.describe()
        job.until_size(3, START_S, steps=11)
        note("driver and worker killed together: next step", seconds(took))
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)
