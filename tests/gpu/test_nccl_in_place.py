"""Workers on CUDA are killed, stopped and added: NCCL groups are re-formed in place."""

from __future__ import annotations

import json
import re
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest

from tests.gpu.conftest import JOBS, ON_CPU, Run, why_not
from tests.support.job import (
    Hosts,
    RunningJob,
    assert_no_step_lost_or_repeated,
    eventually,
    is_running,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

TRAIN = str(JOBS / "train.py")
START_S = 90.0  # for the first CUDA contexts and communicators


def next_step_of(job: RunningJob, pids: set[int], after: float) -> float:
    """Seconds from `after` until the last of these has finished a step in a newer round."""
    before = max(record.round for record in job.steps() if record.t <= after)

    def look() -> float | None:
        first: dict[int, float] = {}
        for record in job.steps():
            if record.round > before and record.pid in pids:
                first.setdefault(record.pid, record.t)
        return max(first.values()) - after if set(first) == pids else None

    return job.until(look, "every survivor has finished a step in the next round")


def assert_equal_everywhere(job: RunningJob) -> None:
    """After each tenth step all workers held the same numbers, bit for bit, and finite ones.

    The last step of one that was killed does not count: the others may have done it again.
    """
    found: dict[int, set[str]] = {}
    killed = {record.worker for record in job.steps() if record.pid in job.killed}
    for path in (job.folder / "digests").iterdir():
        whole = [x for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]
        for line in whole[: -1 if path.name in killed else None]:
            record = json.loads(line)
            found.setdefault(record["step"], set()).add(record["digest"])
    assert found
    assert {step: digests for step, digests in found.items() if len(digests) > 1} == {}
    assert not any("not finite" in digests for digests in found.values())


def last_words(job: RunningJob) -> list[dict[str, str]]:
    """What each worker said at its end."""
    lines = [line for line in job.stdout.splitlines() if "done step=" in line]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


def test_survivors_of_kills_go_on_in_their_processes_and_lose_no_step(run: Run) -> None:
    with run("-np", "3", "--min-np", "1", "--", TRAIN, WIDTH="1024") as job:
        job.until_size(3, START_S)
        survivors, full, threads, files = [], [], {}, {}
        for kill in range(5):
            pids = set(job.until_size(3, START_S, steps=10))
            threads[kill] = {pid: psutil.Process(pid).num_threads() for pid in pids}
            files[kill] = {pid: psutil.Process(pid).num_fds() for pid in pids}
            victim = max(pids)
            killed_at = job.kill(victim)
            survivors.append(next_step_of(job, pids - {victim}, killed_at))
            assert all(is_running(pid) for pid in pids - {victim})
            job.until_size(3, START_S)
            full.append(time.time() - killed_at)
        print("kill to the survivors' next step:", [round(s, 3) for s in survivors])
        print("median:", round(statistics.median(survivors), 3), "s; full size again:", full)
        oldest = min(threads[0])
        print("threads of the oldest worker:", [seen.get(oldest) for seen in threads.values()])
        print("its open files:", [seen.get(oldest) for seen in files.values()])
        assert files[4][oldest] <= files[1][oldest] + 4, "nor an open file"
        assert threads[4][oldest] <= threads[1][oldest] + 4, "a re-formed group leaves no thread"
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
        job.assert_nothing_left()


def test_a_second_group_with_nothing_to_do_holds_up_nobody(run: Run) -> None:
    with run("-np", "3", "--min-np", "1", "--", TRAIN, WIDTH="1024", SECOND_GROUP="1") as job:
        for _ in range(2):
            pids = set(job.until_size(3, START_S, steps=10))
            victim = max(pids)
            killed_at = job.kill(victim)
            took = next_step_of(job, pids - {victim}, killed_at)
            print(f"kill to the survivors' next step with two groups: {took:.3f} s")
            assert all(is_running(pid) for pid in pids - {victim})
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


def test_a_stopped_peer_is_left_behind(run: Run) -> None:
    heartbeat = 3.0
    args = ("-np", "3", "--heartbeat-timeout", str(heartbeat), "--", TRAIN)
    with run(*args) as job:
        pids = set(job.until_size(3, START_S, steps=10))
        victim = min(pids)
        stopped_at = job.kill(victim, signal.SIGSTOP)
        job.killed[victim] = stopped_at
        took = next_step_of(job, pids - {victim}, stopped_at)
        print(f"SIGSTOP to next step: {took:.2f} s, {took - heartbeat:+.2f} s beyond the timeout")
        assert took < heartbeat + 10
        assert pids - {victim} <= set(job.until_size(3, START_S)), "survivors keep their process"
        eventually(lambda: not is_running(victim), within=5, what="the stopped one is killed")
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


def test_a_newcomer_joins_with_the_state_and_all_end_well(run: Run, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    discovery = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2")
    args = (*discovery, "-np", "2", "--min-np", "1", "--max-np", "3", "--", TRAIN)
    with run(*args, STEPS="200", STEP_MS="30") as job:
        first = set(job.until_size(2, START_S, steps=10))
        added_at = time.time()
        hosts.set("localhost:3")
        grown = set(job.until_size(3, START_S))
        print(f"host added to steps of all three: {time.time() - added_at:.2f} s")
        assert first <= grown
        assert job.wait(120) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 200)
        assert_equal_everywhere(job)
        said = last_words(job)
        assert len(said) == 3
        assert len({words["digest"] for words in said}) == 1
        assert all(words["collectives"] == "True" for words in said)
        assert ("nccl" in said[0]["backend"]) is not ON_CPU
        job.assert_nothing_left()


def test_a_fixed_batch_ends_in_the_same_bits_whoever_dies(run: Run) -> None:
    digests = []
    for kills in (0, 1):
        with run("-np", "3", "--min-np", "1", "--", TRAIN, MODE="fixed", STEP_MS="20") as job:
            for _ in range(kills):
                job.kill(max(job.until_size(3, START_S, steps=5)))
            assert job.wait(150) == 0, job.describe()
            assert len(job.killed) == kills
            assert_equal_everywhere(job)
            digests += [words["digest"] for words in last_words(job)]
    assert len(set(digests)) == 1, digests


def test_without_a_wish_devices_of_their_own_are_used(run: Run) -> None:
    with run("-np", "2", "--", TRAIN, STEPS="20", BACKEND="") as job:
        assert job.wait(START_S) == 0, job.describe()
        said = last_words(job)
        assert len(said) == 2
        assert all(("nccl" in words["backend"]) is not ON_CPU for words in said)
