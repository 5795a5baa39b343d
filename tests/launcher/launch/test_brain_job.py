"""`elasticrun --brain`: a job begins with its first grant, and follows the grants after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from elastic_driver.contract import host_of_worker
from tests.e2e.test_control import ctl
from tests.support.brain import PlayedBrain, jobs_token_file, played_brain
from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, elasticrun

TRAIN = "--", str(JOBS / "train.py")
ENV = {"STEPS": "1000000", "STEP_MS": "20"}


def with_brain(brain: PlayedBrain, folder: Path) -> tuple[str, ...]:
    return "--brain", brain.url, "--brain-token-file", str(jobs_token_file(folder))


def trains_on(job: RunningJob) -> dict[str, int]:
    """The slots with a live worker, by host."""
    return dict(Counter(host_of_worker(r.worker) for r in job.live().values()))


def until_on(job: RunningJob, **hosts: int) -> None:
    expected = {name.replace("__", "."): slots for name, slots in hosts.items()}
    size = sum(hosts.values())

    def there() -> bool:
        newest = {r.size for r in job.live().values()}
        return trains_on(job) == expected and newest == {size}

    job.until(there, f"training on {expected}", 60)


@pytest.mark.timeout(200)
def test_a_job_trains_where_the_brain_says_and_says_what_it_holds(tmp_path: Path) -> None:
    with played_brain() as brain, elasticrun(*with_brain(brain, tmp_path), *TRAIN, env=ENV) as job:
        brain.until(lambda r: r.least == 1, "the job asks for slots")
        assert not job.events(), "nothing has begun"
        brain.grant(job.run_id, 5, localhost=2)
        until_on(job, localhost=2)
        report = brain.until(lambda r: r.holding == {"localhost": 2}, "it tells its slots")
        assert (report.carried_out, report.held) == (5, None)
        seen = brain.until(lambda r: r.speed is not None and r.speed.steps > 5, "its speed").speed
        assert seen is not None
        assert (seen.size, seen.hosts) == (2, 1)
        brain.grant(job.run_id, 6, **{"127__0__0__2": 1, "localhost": 1})
        until_on(job, **{"127__0__0__2": 1, "localhost": 1})
        brain.until(
            lambda r: r.carried_out == 6 and r.holding == {"localhost": 1, "127.0.0.2": 1},
            "the slot that it has given up is free",
        )
        where = "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id
        ctl("scale", "1", *where)
        brain.until(lambda r: r.held == 1, "what the user asked for")
        ctl("scale", "auto", *where)
        brain.until(lambda r: r.held is None, "that it is released")
        last = min(record.step for record in job.live().values())
        ctl("stop", *where)
        assert job.wait() == 143
        job.assert_nothing_left()
        assert [(name, over.exit_code) for name, over in brain.over] == [(job.run_id, 143)]
        assert_no_step_lost_or_repeated(job, last)
        assert not job.events("job_failed") or "reset" not in job.stderr


@pytest.mark.timeout(200)
def test_the_brain_is_told_what_a_job_trains_as_its_statistics_have_it(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from elastic_driver.brain.store.address import Address
    from elastic_driver.brain.store.database import Database

    with played_brain() as brain, elasticrun(*with_brain(brain, tmp_path), *TRAIN, env=ENV) as job:
        brain.until(lambda r: True, "the job asks for slots")
        brain.grant(job.run_id, 1, localhost=1)
        told = brain.until(lambda r: r.kind.parameters is not None, "its model is known", 90).kind
        database = Database(Address(file=str(job.run_dir / "statistics.db")))
        with contextlib.closing(database):
            kept = lambda: [record.kind for _, record in database.records()]  # noqa: E731
            job.until(lambda: kept() == [told], "the same in its statistics")
    assert told.parameters == 20 * 50 + 50 + 50 + 1


@pytest.mark.timeout(200)
def test_a_job_trains_on_while_the_brain_is_away_and_replaces_its_workers(tmp_path: Path) -> None:
    with played_brain() as brain, elasticrun(*with_brain(brain, tmp_path), *TRAIN, env=ENV) as job:
        brain.until(lambda r: True, "the job asks for slots")
        brain.grant(job.run_id, 1, localhost=2)
        until_on(job, localhost=2)
        port = brain.server.port
        brain.server.stop()
        job.until(lambda: "is away; the job keeps its slots" in job.stderr, "a line about it")
        before = set(job.live())
        job.kill(min(before))
        job.until(lambda: len(set(job.live()) - before) == 1, "a worker in its place")
        until_on(job, localhost=2)
        with played_brain(port) as again:
            again.until(lambda r: r.holding == {"localhost": 2}, "the same slots")
            job.until(lambda: "is back" in job.stderr, "a line that it is back")
            again.grant(job.run_id, 2, localhost=1)
            until_on(job, localhost=1)


@pytest.mark.timeout(200)
def test_a_resumed_driver_goes_on_with_its_grant_and_is_the_same_run(tmp_path: Path) -> None:
    with played_brain() as brain, elasticrun(*with_brain(brain, tmp_path), *TRAIN, env=ENV) as job:
        brain.until(lambda r: True, "the job asks for slots")
        brain.grant(job.run_id, 1, localhost=2)
        until_on(job, localhost=2)
        job.kill_driver()
        number = len(brain.reports)
        job.start("--resume")
        job.until(lambda: job.events("driver_resumed"), "the next driver")
        eventually_new = brain.until(
            lambda r: len(brain.reports) > number and r.carried_out == 1, "its reports"
        )
        assert eventually_new.began == brain.reports[0][1].began
        assert {r.carried_out for _, r in brain.reports[number:]} == {1}
        assert all(r.holding == {"localhost": 2} for _, r in brain.reports[number:])
        brain.grant(job.run_id, 2, localhost=1)
        until_on(job, localhost=1)


@pytest.mark.timeout(200)
def test_a_driver_that_is_resumed_late_starts_nothing_before_the_brain_says_where(
    tmp_path: Path,
) -> None:
    lives_on = (
        "--driver-timeout",
        "1",
        "--heartbeat-timeout",
        "2",
        "--grace-period",
        "1",
        "--restart-from-scratch",
    )
    with (
        played_brain() as brain,
        elasticrun(*with_brain(brain, tmp_path), *lives_on, *TRAIN, env=ENV) as job,
    ):
        brain.until(lambda r: True, "the job asks for slots")
        brain.grant(job.run_id, 1, localhost=2)
        until_on(job, localhost=2)
        patience = brain.reports[-1][1].lives_on
        job.kill_driver()
        died = time.time()
        job.until_without_driver(lambda: not job.live(), "its workers end")
        job.until_without_driver(lambda: time.time() > died + patience, "others may use its slots")
        steps = len(job.steps())
        job.start("--resume")
        late = "the last driver ended long ago"
        job.until(lambda: late in job.stderr, "it waits for the Brain")
        asks = brain.until(lambda r: r.carried_out == 0, "it asks for slots")
        assert asks.holding == {}
        assert len(job.steps()) == steps
        brain.grant(job.run_id, 2, **{"127__0__0__2": 1})
        until_on(job, **{"127__0__0__2": 1})
        since = [record for record in job.steps()[steps:] if record.t > died + patience]
        assert {host_of_worker(record.worker) for record in since} == {"127.0.0.2"}


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli", "--state-dir", str(folder / "state"), *words],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )


def test_a_job_that_gets_no_slots_in_time_ends_with_one_line(tmp_path: Path) -> None:
    with played_brain() as brain:
        short = *with_brain(brain, tmp_path), "--start-timeout", "1", "true"
        found = run(*short, folder=tmp_path)
        url = brain.url
    assert found.returncode == 75
    assert f"the Brain at {url} granted no slots within 1 s" in found.stderr
    away = run(*short, folder=tmp_path)
    assert away.returncode == 75
    assert f"the Brain at {url} did not answer within 1 s" in away.stderr
    assert "Traceback" not in found.stderr + away.stderr


def test_a_job_that_waits_for_slots_ends_at_once_by_ctrl_c_and_asks_for_none_any_more(
    tmp_path: Path,
) -> None:
    with played_brain() as brain, elasticrun(*with_brain(brain, tmp_path), *TRAIN, env=ENV) as job:
        brain.until(lambda r: True, "the job asks for slots")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert "the wait for the Brain was stopped by SIGINT; nothing was started" in job.stderr
        assert [name for name, _ in brain.over] == [job.run_id]


def test_with_a_fallback_it_trains_on_its_own_hosts_when_the_brain_is_away(tmp_path: Path) -> None:
    with played_brain() as brain:
        words = with_brain(brain, tmp_path)
    own = "--brain-fallback", "-H", "localhost:1", "--start-timeout", "8"
    found = run(*words, *own, "--", "sh", "-c", "echo trained", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "trained" in found.stdout
    assert "is away: the job trains on its own hosts, with --auto-scale" in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weight", "2"), "--weight needs the address of a Brain: --brain URL"),
        (("--brain", "http://127.0.0.1:1", "-np", "2"), "--num-proc cannot be given with --brain"),
        (("--brain", "http://127.0.0.1:1", "-H", "a:1"), "--hosts names hosts"),
        (("--brain", "http://127.0.0.1:1", "--node-unit", "2"), "--node-unit cannot be given"),
        (("--brain", "http://127.0.0.1:1"), "there is no token of the Brain in"),
        (("--brain", "http://10.9.8.7:1"), "beyond this machine a Brain speaks TLS only"),
        (("--brain", "somewhere"), "needs http(s)://HOST:PORT"),
        (("--brain", "http://127.0.0.1:1", "--weight", "0"), "--weight needs a number above 0"),
        (
            ("--brain", "http://127.0.0.1:1", "--min-np", "3", "--max-np", "2"),
            "--min-np 3 is more than --max-np 2",
        ),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    found = run(*words, "--", "true", folder=tmp_path)
    assert (found.returncode, said in found.stderr) == (64, True), found.stderr
    assert len(found.stderr.strip().splitlines()) == 1, found.stderr


def test_a_wrong_token_is_one_line(tmp_path: Path) -> None:
    with played_brain() as brain:
        wrong = jobs_token_file(tmp_path)
        wrong.write_text("job::0123\n")
        words = "--brain", brain.url, "--brain-token-file", str(wrong), "--", "true"
        found = run(*words, folder=tmp_path)
    assert found.returncode == 64
    assert f"the Brain at {brain.url} refused the token" in found.stderr
