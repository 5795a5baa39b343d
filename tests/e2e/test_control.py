"""`elasticctl` with a job that runs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import JOBS, ROOT, RunningJob, elasticrun, eventually

TRAIN = str(JOBS / "train.py")


def ctl(*words: str, code: int = 0) -> str:
    """What `elasticctl WORDS…` says: stdout, or stderr where it is to fail."""
    argv = [sys.executable, "-m", "launcher.ctl", *words]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == code, ran
    assert "Traceback" not in ran.stderr
    return ran.stderr if code else ran.stdout


def follow(job: RunningJob, into: Path, *words: str) -> subprocess.Popen[bytes]:
    """`elasticctl WORDS…` in the background; marked as the job's, so that it is not left behind."""
    env = {**os.environ, "TEST_RUN_ID": job.run_id}
    argv = [sys.executable, "-m", "launcher.ctl", *words, *here(job)]
    with into.open("wb") as out:
        return subprocess.Popen(argv, cwd=ROOT, stdout=out, env=env)


@pytest.fixture(scope="module")
def job() -> Iterator[RunningJob]:
    """Two workers of at most three, that train until they are stopped."""
    args = ("-H", "localhost:3", "-np", "2", "--min-np", "1", "--max-np", "2", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as running:
        running.until_size(2)
        yield running


def here(job: RunningJob) -> tuple[str, str]:
    return "--state-dir", str(job.run_dir.parent)


def test_the_status_shows_the_job_its_host_and_its_workers(job: RunningJob) -> None:
    text = ctl("status", *here(job))
    assert f"run {job.run_id} at http://" in text
    assert "2 workers (2 wanted, 1 to 2)" in text
    assert re.search(
        r"^localhost +usable +3 +2 +ready +(-|\d+%) +(-|\S+ \S+ of \S+ \S+)$", text, re.MULTILINE
    )
    for pid, record in job.live().items():
        assert re.search(rf"^{record.rank} +running +localhost +\d +{pid} ", text, re.MULTILINE)


def test_the_stacks_of_all_ranks_are_shown_while_nothing_hangs(job: RunningJob) -> None:
    text = ctl("stacks", *here(job))
    assert "asked for by elasticctl stacks" in text
    assert sorted(map(int, re.findall(r"\b\d\b", " ".join(RANKS.findall(text))))) == [0, 1]
    assert "train.py" in text
    assert ctl("stacks", "--last", *here(job)) == text
    assert len(job.live()) == 2, "nobody was stopped for it"


RANKS = re.compile(r"^ranks? ([\d, ]+):", re.MULTILINE)


def test_top_shows_the_job_live_and_its_keys_act(job: RunningJob) -> None:
    assert "2 workers (2 wanted, 1 to 2)" in ctl("status", *here(job))
    person, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    argv = [sys.executable, "-m", "launcher.ctl", "top", "--interval", "0.5", *here(job)]
    env = {**os.environ, "TEST_RUN_ID": job.run_id, "TERM": "xterm"}
    env.pop("COLUMNS", None)  # which pytest-xdist sets
    env.pop("LINES", None)
    with open(person, "r+b", buffering=0) as screen:
        showing = subprocess.Popen(argv, cwd=ROOT, stdin=ours, stdout=ours, stderr=ours, env=env)
        os.close(ours)
        seen = bytearray()

        def until(text: bytes) -> None:
            def look() -> bool:
                if select.select([screen], [], [], 0.1)[0]:
                    seen.extend(screen.read(65536))
                return text in seen

            eventually(look, within=60, what=f"{text!r} on the screen")
            seen.clear()

        until(b"q quit")
        screen.write(b"u")
        until(b"host localhost is not drained, it is usable")
        screen.write(b"s")
        until(b"train.py")
        screen.write(b"x")
        until(min(job.live().values(), key=lambda record: record.rank).worker.encode())
        screen.write(b"q")
        assert showing.wait(30) == 0


def test_a_rank_that_cannot_answer_is_seen_from_outside(job: RunningJob) -> None:
    pid, record = next(iter(job.live().items()))
    job.kill(pid, signal.SIGSTOP)
    try:
        text = ctl("stacks", *here(job))
    finally:
        job.kill(pid, signal.SIGCONT)
    assert re.search(rf"^rank {record.rank}: no answer; its process is stopped", text, re.MULTILINE)


def test_the_status_as_json_is_the_driver_s_own_document(job: RunningJob) -> None:
    document = json.loads(ctl("status", "--json", "--run_id", job.run_id, *here(job)))
    explained = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "status.md").read_text()))
    assert not set(document) - explained, "docs/status.md explains every key"
    assert (document["run_id"], document["state"]) == (job.run_id, "running")
    assert json.loads(ctl("hosts", "--json", *here(job))) == document["hosts"]
    assert ctl("hosts", *here(job)).startswith("HOST ")


def test_the_job_is_found_by_its_address_and_token(job: RunningJob, tmp_path: Path) -> None:
    url = json.loads((job.run_dir / "endpoint.json").read_text())["url"]
    elsewhere = ("--state-dir", str(tmp_path))
    token = ("--token-file", str(job.run_dir / "token"))
    assert job.run_id in ctl("status", *elsewhere, "--endpoint", url, *token)
    assert "name its token" in ctl("status", *elsewhere, "--endpoint", url, code=64)
    wrong = tmp_path / "wrong"
    wrong.write_text("not the token\n")
    wrong.chmod(0o600)
    refused = ctl("status", "--endpoint", url, "--token-file", str(wrong), code=75)
    assert "refused our token" in refused


def test_the_events_are_those_of_the_log(job: RunningJob) -> None:
    listed = [json.loads(x) for x in ctl("events", "--json", *here(job)).splitlines()]
    assert listed == job.events()[: len(listed)]
    assert listed[0]["event"] == "job_started"
    some = ctl("events", "--since", str(listed[2]["n"]), *here(job)).splitlines()
    assert listed[3]["event"] in some[0]
    shown = ctl("events", *here(job))
    assert re.search(
        r"^[\d:]{8} +\d+ round 1 complete: 2 workers on 1 host: .*\[round_c", shown, re.M
    )


def test_what_the_job_refuses_is_one_line_and_64(job: RunningJob) -> None:
    told = ctl("scale", "9", *here(job), code=64)
    assert told.startswith("elasticctl: 9 workers are more than the job's maximum of 2")
    assert len(told.splitlines()) == 1
    assert "knows no host 'z'; it knows localhost" in ctl("drain", "z", *here(job), code=64)
    assert "not drained" in ctl("drain", "localhost", "--cancel", *here(job), code=64)


def test_a_plan_changes_the_job_once_and_a_stale_one_is_one_line_and_64(
    job: RunningJob, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("number: 7\nslots_per_host: 1\ncpu_per_worker: 0.1\nmemory_per_worker: 1MiB\n")
    assert "plan 7: slots per host 1" in ctl("apply", str(plan), *here(job))
    job.until_size(1)
    told = ctl("apply", str(plan), *here(job), code=64)
    assert told.startswith("elasticctl: plan 7 is stale: plan 7 was carried out")
    assert len(told.splitlines()) == 1
    plan.write_text("memory_per_worker: 900TiB\n")
    told = ctl("apply", str(plan), *here(job), code=64)
    assert told == "elasticctl: plan 8 leaves 0 slots, fewer than the 1 needed\n"
    plan.write_text("workers: 9\n")
    assert "the job's maximum of 2" in ctl("apply", str(plan), *here(job), code=64)
    plan.write_text("workers: 1\nmin: 1\n")
    assert "not both" in ctl("apply", str(plan), *here(job), code=64)
    plan.write_text("min: 1\nmax: 2\n")
    assert "plan 8: min 1, max 2" in ctl("apply", str(plan), *here(job))
    job.until_size(2)
    assert json.loads(ctl("status", "--json", *here(job)))["counters"]["resets"] == 0


def test_the_job_is_scaled_and_back(job: RunningJob) -> None:
    pids = set(job.live())
    assert "asked for 1 worker" in ctl("scale", "1", *here(job))
    job.until_size(1)
    ctl("scale", "2", *here(job))
    assert set(job.until_size(2)) & pids


def test_a_job_that_is_stopped_ends_with_143_and_whoever_follows_sees_it(tmp_path: Path) -> None:
    args = ("-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        job.until_size(1)
        events, status = tmp_path / "events", tmp_path / "status"
        followers = [
            follow(job, events, "events", "-f"),
            follow(job, status, "status", "--watch", "--interval", "0.1"),
        ]
        both = (events, status)
        eventually(lambda: all(f.stat().st_size for f in both), within=30, what="both have begun")
        assert "is stopping" in ctl("stop", "--reason", "enough", *here(job))
        assert job.wait(90) == 143
        assert "told to stop: enough" in job.stderr
        assert [f.wait(30) for f in followers] == [0, 0]
        assert "the job was stopped: told to stop: enough [job_failed]" in events.read_text()
        assert f"run {job.run_id} at" in status.read_text()
        job.assert_nothing_left()
        over = ctl("status", "--run-id", job.run_id, *here(job))
        assert f"run {job.run_id}" in over
        assert "told to stop: enough" in over
        assert "no job of this user is running" in ctl("status", *here(job), code=75)


def test_a_driver_that_was_killed_is_recognised(tmp_path: Path) -> None:
    args = ("-np", "1", "--driver-timeout", "0", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        job.until_size(1)
        left = (job.run_dir / "endpoint.json").read_bytes()
        job.process.kill()
        job.process.wait(10)
        job.assert_nothing_left(within=20)
        (job.run_dir / "endpoint.json").write_bytes(left)  # as when its agents died with it
        told = ctl("status", "--run-id", job.run_id, *here(job), code=75)
        assert f"its driver (process {job.process.pid}" in told
