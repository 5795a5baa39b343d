"""How jobs end: exit status, what is said, and that nothing is started over in vain."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.job import JOBS, elasticrun

TRAIN = str(JOBS / "train.py")
PLAIN = str(JOBS / "plain.py")


def script(folder: Path, text: str) -> str:
    path = folder / "job.py"
    path.write_text(text)
    return str(path)


def test_a_typo_ends_the_job_quickly_with_its_traceback_once(tmp_path: Path) -> None:
    typo = script(tmp_path, "import json\nprint('up', flush=True)\njson.lods('1')\n")
    with elasticrun("-np", "3", "--", typo) as job:
        assert job.wait(15) == 1
        said = job.stdout + job.stderr
        assert said.count("Traceback (most recent call last)") == 1
        assert said.count("AttributeError") == 1
        assert len(job.events("worker_started")) == 3, "no restart"
        last = job.stderr.splitlines()[-25:]
        assert any("rank" in line and "localhost" in line and "exit" in line for line in last)
        job.assert_nothing_left()


def test_every_worker_raising_after_some_steps_ends_the_job_with_its_code() -> None:
    with elasticrun("-np", "3", "--", TRAIN, env={"FAIL_STEP": "5"}) as job:
        assert job.wait(90) == 1
        assert job.stderr.count("ValueError: boom at step 5") <= 3
        assert len(job.events("worker_started")) <= 6
        assert "Traceback" in job.stderr
        job.assert_nothing_left()


@pytest.mark.parametrize("begin", ["", "import elastic_driver as elastic; elastic.init()\n"])
def test_a_script_that_always_fails_shows_its_traceback_while_it_is_restarted(
    tmp_path: Path, begin: str
) -> None:
    bad = script(tmp_path, f"{begin}raise ValueError('boom')\n")
    with elasticrun("-np", "2", "--max-restarts", "1000", "--", bad) as job:
        exits = job.until(lambda: job.events("worker_exited"), "a worker fails", within=60)
        job.until(lambda: "ValueError: boom" in job.stderr, "its last words", within=10)
        assert time.time() - exits[0]["t"] < 2.0
        job.until(lambda: "like those above" in job.stderr, "later failures are counted")
        job.until(lambda: len(job.events("worker_exited")) > 2, "it is restarted", within=60)
        assert job.stderr.count("ValueError: boom") == 1


def test_the_exit_status_is_that_of_the_first_failing_worker() -> None:
    with elasticrun("-np", "2", "--", TRAIN, env={"FAIL_STEP": "1", "FAIL_HOW": "17"}) as job:
        assert job.wait(90) == 17


def test_the_result_of_every_worker_is_shown_when_the_job_is_over(tmp_path: Path) -> None:
    text = "import os, sys\nprint('bye', os.environ['RANK'], file=sys.stderr)\n"
    text += "sys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    with elasticrun("-np", "2", "--", script(tmp_path, text)) as job:
        assert job.wait(90) == 3
        state = ("--state-dir", str(job.run_dir.parent), "--run-id", job.run_id)
        status = [sys.executable, "-m", "launcher.ctl", "status", *state]
        shown = subprocess.run(status, capture_output=True, text=True, check=True, timeout=30)
        assert f"run {job.run_id} failed" in shown.stdout
        rows = {row.split()[0]: row for row in shown.stdout.splitlines() if row.split()}
        assert "bye" not in rows["0"], "it has succeeded"
        assert "bye 1" in rows["1"]
        ended = subprocess.run([*status, "--json"], capture_output=True, check=True, timeout=30)
        workers = json.loads(ended.stdout)["workers"]
        assert [w["last_words"] for w in workers] == ["bye 0", "bye 1"]
        assert workers[1]["exit_code"] == 3


@pytest.mark.parametrize("call", ["run()", "t = threading.Thread(target=run); t.start(); t.join()"])
def test_a_job_can_be_run_from_python_and_returns_the_results_of_its_workers(
    tmp_path: Path, call: str
) -> None:
    program = f"""
import sys, threading
from launcher.cli import elasticrun
def run():
    result = elasticrun("--state-dir", sys.argv[1], "-np", "2", "sh", "-c", "exit $RANK")
    print(result.exit_code, [(w.rank, w.exit_code) for w in result.workers])
{call}
"""
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1 [(0, 0), (1, 1)]\n"


def test_all_exit_0_is_success_for_any_executable() -> None:
    with elasticrun("-np", "2", "--", "sh", "-c", 'echo "hello $RANK of $WORLD_SIZE"') as job:
        assert job.wait(90) == 0
        assert "[0]<stdout>:hello 0 of 2" in job.stdout
        assert "[1]<stdout>:hello 1 of 2" in job.stdout
        assert [e["event"] for e in job.events()][-1] == "job_succeeded"


def test_a_plain_script_runs_unmodified() -> None:
    with elasticrun("-np", "2", "--", PLAIN) as job:
        assert job.wait(90) == 0, job.describe()
        assert job.stdout.count("plain done restarts=0 size=2") == 2


SAVES = """
import os, signal, sys, time

def say(what):
    print(what, "rank", os.environ["RANK"], flush=True)

def on_term(*_):
    say("told by SIGTERM")
    time.sleep(6)  # longer than a few seconds: it writes its state
    say("has saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, on_term)
if "DEAF" in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
say("trains")
try:
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    say("interrupted")
    time.sleep(1)
    say("has saved")
"""


@pytest.mark.parametrize(
    ("number", "env", "grace", "told"),
    [
        (signal.SIGINT, {}, None, "interrupted"),
        (signal.SIGTERM, {}, None, "told by SIGTERM"),
        (signal.SIGINT, {"DEAF": "1"}, "14", "told by SIGTERM"),
    ],
)
def test_a_plain_script_that_is_stopped_can_save_as_under_torchrun(
    tmp_path: Path, number: int, env: dict[str, str], grace: str | None, told: str
) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    options = ("-np", "2") if grace is None else ("-np", "2", "--stop-grace", grace)
    with elasticrun(*options, "--", str(script), env=env) as job:
        job.until(lambda: job.stdout.count("trains") == 2, "both train")
        job.process.send_signal(number)
        assert job.wait(60) == 128 + number, job.describe()
        assert job.stdout.count(told) == 2
        assert job.stdout.count("has saved") == 2
        if told != "interrupted":  # those end within a second
            left, again = int(grace or "30") - 2, "; Ctrl-C again kills at once"
            waits = f"waiting for 2 workers to end, {left} s at most ("
            (line,) = [line for line in job.stderr.splitlines() if waits in line]
            assert line.endswith(again) is (number == signal.SIGINT)
        others = {"interrupted", "told by SIGTERM"} - {told}
        assert not any(other in job.stdout for other in others)
        job.assert_nothing_left()


def test_a_plain_script_is_started_again_with_new_ranks_after_a_kill() -> None:
    with elasticrun("-np", "2", "--", PLAIN, env={"STEPS": "150"}) as job:
        notes = job.folder / "steps"
        job.until(lambda: len(list(notes.glob("plain.*"))) == 2, "both train")
        job.kill(int(next(notes.glob("plain.*")).name.split(".")[1]))
        assert job.wait(60) == 0, job.describe()
        assert job.stdout.count("plain done restarts=1 size=2") == 2
        job.assert_nothing_left()


def test_a_plain_script_whose_one_rank_fails_once_is_started_again() -> None:
    with elasticrun("-np", "2", "--", PLAIN, env={"FAIL_ONCE": "3"}) as job:
        assert job.wait(60) == 0, job.describe()
        assert job.stdout.count("plain done restarts=1 size=2") == 2


def test_the_restart_budget_ends_the_job_and_names_itself() -> None:
    args = ("-np", "2", "--max-restarts", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        for _ in range(2):
            pids = sorted(job.until_size(2))
            job.kill(pids[-1])
            time_limit = time.monotonic() + 30
            while job.process.poll() is None and time.monotonic() < time_limit:
                if any(r.size == 2 and r.pid not in pids for r in job.steps()):
                    break
                time.sleep(0.02)
        assert job.wait(90) == 128 + signal.SIGKILL
        assert "--max-restarts" in job.stderr
        job.assert_nothing_left()


def test_the_reset_limit_ends_the_job_and_names_itself() -> None:
    args = ("-np", "2", "--reset-limit", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        pids = sorted(job.until_size(2))
        job.kill(pids[-1])
        assert job.wait(90) != 0
        assert "--reset-limit" in job.stderr
        job.assert_nothing_left()


def test_a_worker_killed_after_a_peers_success_does_not_spoil_it(tmp_path: Path) -> None:
    late = script(
        tmp_path,
        "import os, time, elastic_driver as elastic\n"
        "elastic.init()\n"
        "rank = elastic.rank()\n"
        "elastic.shutdown()\n"
        "if rank == 0:\n"
        "    os._exit(0)\n"  # at once: the other one must not be faster than an interpreter's end
        "time.sleep(3)\n"
        "os.kill(os.getpid(), 9)\n",
    )
    with elasticrun("-np", "2", "--", late) as job:
        assert job.wait(90) == 0, job.describe()
        assert len(job.events("worker_started")) == 2
