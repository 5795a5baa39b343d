"""Workers on CUDA are killed, stopped and added: NCCL groups are re-formed in place."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from statistics import median

import pytest

from tests.gpu.conftest import JOBS, ON_CPU, START_S, Note, Run, why_not
from tests.gpu.watching import (
    assert_equal_everywhere,
    last_words,
    next_step_of,
    seconds,
    written,
)
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
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

TRAIN = str(JOBS / "train.py")
KILLS, KILLING_S = 25, 50.0  # at most, of one job; each makes two rounds


def test_survivors_of_kills_go_on_in_their_processes_and_lose_no_step(run: Run, note: Note) -> None:
    with run("-np", "3", "--min-np", "1", "--", TRAIN, WIDTH="1024") as job:
        job.until_size(3, START_S)
        begun, survivors, full = time.monotonic(), [], []
        oldest = set(job.until_size(3, START_S, steps=10))
        while len(full) < KILLS and time.monotonic() < begun + KILLING_S:
            pids = set(job.until_size(3, START_S, steps=10))
            victim = max(pids - oldest, default=max(pids))
            oldest -= {victim}
            killed_at = job.kill(victim)
            survivors.append(next_step_of(job, pids - {victim}, killed_at))
            assert all(is_running(pid) for pid in pids - {victim})
            job.until_size(3, START_S)
            full.append(time.time() - killed_at)
        job.until_size(3, START_S, steps=25)
        slowest = f"slowest {max(survivors):.2f} s"
        note(f"{len(full)} kills: next step, median", f"{median(survivors):.2f} s, {slowest}")
        note("… full size again, median", f"{median(full):.2f} s, slowest {max(full):.2f} s")
        workers = {record.worker for record in job.steps() if record.pid in oldest}
        assert len(workers) == 2
        assert_nothing_grows(job, workers, note)
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
        job.assert_nothing_left()


def assert_nothing_grows(job: RunningJob, workers: set[str], note: Note) -> None:
    """Rounds have left nothing behind in these workers, after the first third of them."""
    for worker in sorted(workers):
        facts = [line["of"] for line in written(job, "digests")[worker]]
        facts = [each for each in facts if each["size"] == 3]
        early, late = facts[len(facts) // 3 :][:5], facts[-5:]
        said = []
        for name, allowed in (("threads", 4), ("files", 4), ("rss", 60), ("free", 64)):
            before, after = (median(each[name] for each in part) for part in (early, late))
            said.append(f"{name} {before:.0f} → {after:.0f}")
            growth = before - after if name == "free" else after - before
            assert growth <= allowed, (name, [each[name] for each in facts])
        note(f"… {worker}, MiB", ", ".join(said))


def next_step_after_a_kill(job: RunningJob, steps: int) -> tuple[float, float]:
    """Kill one of three workers that have made steps; return the seconds, and when it was killed.

    The others keep their processes.
    """
    pids = set(job.until_size(3, START_S, steps=steps))
    victim = max(pids)
    killed_at = job.kill(victim)
    took = next_step_of(job, pids - {victim}, killed_at)
    assert all(is_running(pid) for pid in pids - {victim})
    return took, killed_at


def test_a_second_group_with_nothing_to_do_holds_up_nobody(run: Run, note: Note) -> None:
    took = []
    with run("-np", "3", "--min-np", "1", "--", TRAIN, WIDTH="1024", SECOND_GROUP="1") as job:
        for _ in range(2):
            took.append(next_step_after_a_kill(job, steps=10)[0])
        note("two groups, kills: next step", seconds(took))
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


def test_a_large_model(run: Run, note: Note) -> None:
    """Its gradients and its state are so large that kills fall into their all-reduce."""
    took, full = [], []
    width = "1024" if ON_CPU else "8192"
    with run("-np", "3", "--min-np", "1", "--", TRAIN, WIDTH=width) as job:
        for _ in range(3):
            seconds_until, killed_at = next_step_after_a_kill(job, steps=5)
            took.append(seconds_until)
            job.until_size(3, START_S)
            full.append(time.time() - killed_at)
        job.until_size(3, START_S, steps=11)
        note(f"model of {width}² parameters, kills: next step", seconds(took))
        note("… full size again", seconds(full))
        sent = [e["seconds"] for e in job.events("state_synced") if e.get("receivers") == 1]
        note("… state to a newcomer, parameters and Adam's", seconds(sent))
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


def test_a_stopped_peer_is_left_behind(run: Run, note: Note) -> None:
    heartbeat = 3.0
    args = ("-np", "3", "--heartbeat-timeout", str(heartbeat), "--", TRAIN)
    with run(*args) as job:
        pids = set(job.until_size(3, START_S, steps=10))
        victim = min(pids)
        stopped_at = job.kill(victim, signal.SIGSTOP)
        job.killed[victim] = stopped_at
        took = next_step_of(job, pids - {victim}, stopped_at)
        note("a stopped peer: next step", f"{took - heartbeat:+.2f} s beyond --heartbeat-timeout")
        assert took < heartbeat + 10
        assert pids - {victim} <= set(job.until_size(3, START_S)), "survivors keep their process"
        eventually(lambda: not is_running(victim), within=5, what="the stopped one is killed")
        assert_no_step_lost_or_repeated(job, min(r.step for r in job.live().values()))
        assert_equal_everywhere(job)


def test_a_newcomer_joins_with_the_state_and_all_end_well(
    run: Run, note: Note, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    discovery = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2")
    args = (*discovery, "-np", "2", "--min-np", "1", "--max-np", "3", "--", TRAIN)
    with run(*args, STEPS="200", STEP_MS="30") as job:
        first = set(job.until_size(2, START_S, steps=10))
        added_at = time.time()
        hosts.set("localhost:3")
        grown = set(job.until_size(3, START_S))
        note("a host is added: steps of all three", f"{time.time() - added_at:.2f} s")
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
    """Over NCCL without and with a kill, and over gloo."""
    digests = []
    for kills, more in ((0, {}), (1, {}), (0, {"BACKEND": "gloo"})):
        with run(
            "-np", "3", "--min-np", "1", "--", TRAIN, MODE="fixed", STEP_MS="5", **more
        ) as job:
            for _ in range(kills):
                job.kill(max(job.until_size(3, START_S, steps=5)))
            assert job.wait(60) == 0, job.describe()
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
