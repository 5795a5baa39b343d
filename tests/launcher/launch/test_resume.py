"""Which command lines begin a job, which go on with one, and which are refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import HostsDiscovered
from elastic_driver.job.job import Job
from elastic_driver.runtime.journal.journal_file import Head
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import Holder, RunDir, read_endpoint
from elastic_driver.settings import Settings
from elastic_driver.words.wire_events import AgentReady
from launcher import cli
from launcher.launch.resume import line_of, take_named, take_unfinished
from launcher.options.given import resolve

START = ("--run-id", "big", "-np", "2", "train.py")
END = '{"event": "job_started"}\n{"event":"job_failed","exit_code":3,"reason":"boom","t":5.0}\n'


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A folder of runs in which the driver of `big` has died."""
    run_dir = RunDir(tmp_path / "state", "big")
    run_dir.create()
    run_dir.token_file.write_text("secret")
    begin_journal(run_dir, str(tmp_path), Job(Settings()))
    run_dir.leave()
    return tmp_path / "state"


def begin_journal(run_dir: RunDir, cwd: str, job: Job) -> None:
    journal = Journal(run_dir.journal_file, "big")
    journal.open(Head("big", resolve(START, {}).words, cwd))
    parts = {"job": job, "shards": DataSets(), "tf": TfCluster(30.0)}
    journal.snapshot(0, 0.0, {name: part.snapshot() for name, part in parts.items()})
    journal.close()


@contextlib.contextmanager
def folder(state_dir: Path) -> Iterator[RunDir]:
    run_dir = RunDir(state_dir, "big")
    try:
        yield run_dir
    finally:
        run_dir.leave()


def test_the_same_command_goes_on_with_the_job_in_whatever_spelling(state_dir: Path) -> None:
    cwd = str(state_dir.parent)
    for argv in (START, ("--resume", "--num_proc=2", "--run-id", "big", "--", "train.py")):
        with folder(state_dir) as run_dir:
            run = take_unfinished(resolve(argv, {}), run_dir, cwd)
            assert isinstance(run, ResumedRun)
            assert (run.run_id, run.term, run.cwd) == ("big", 1, cwd)
            with folder(state_dir) as other, pytest.raises(UsageError, match="is in use"):
                take_unfinished(resolve(argv, {}), other, cwd)


def test_another_command_for_an_unfinished_job_is_refused_with_what_to_type(
    state_dir: Path,
) -> None:
    line = resolve(("--run-id", "big", "-np", "3", "train.py"), {})
    with folder(state_dir) as run_dir:
        with pytest.raises(UsageError, match="elasticrun --resume --run-id big") as caught:
            take_unfinished(line, run_dir, str(state_dir.parent))
        assert "--num-proc=2 --run-id=big -- train.py; go on" in str(caught.value)
        with pytest.raises(UsageError, match=f"started .* in {state_dir.parent}: "):
            take_unfinished(resolve(START, {}), run_dir, "/elsewhere")
        run_dir.take()  # the lock was given back


def test_a_job_whose_driver_died_before_it_started_anything_is_begun_again(
    state_dir: Path,
) -> None:
    with folder(state_dir) as run_dir:
        run_dir.journal_file.write_bytes(b"")
        for argv in (START, ("--resume", *START)):
            assert take_unfinished(resolve(argv, {}), run_dir, str(state_dir.parent)) is None
        run_dir.create()  # as a job that begins does


def test_a_job_that_is_over_is_begun_again_unless_it_is_to_go_on(state_dir: Path) -> None:
    run_dir = RunDir(state_dir, "big")
    run_dir.events_file.write_text(END)
    run_dir.lock.path.unlink()
    assert take_unfinished(resolve(START, {}), run_dir, "/") is None
    result = take_unfinished(resolve(("--resume", *START), {}), run_dir, "/")
    assert isinstance(result, JobResult)
    assert (result.exit_code, result.reason) == (3, "boom")


def test_a_job_that_is_unknown_is_begun_if_a_command_is_given(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "new")
    assert take_unfinished(resolve(("--resume", "train.py"), {}), run_dir, "/") is None
    with pytest.raises(UsageError, match=f"there is no run new in {tmp_path}; .*its command"):
        take_named(resolve(("--resume", "--run-id", "new"), {}), tmp_path)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "--resume needs the name of the job"),
        (("--run-id", "big", "-np", "3"), "--num-proc cannot be given with --resume"),
    ],
)
def test_a_job_is_named_and_nothing_else_about_it_is_given(
    state_dir: Path, argv: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        take_named(resolve(("--resume", *argv), {}), state_dir)


def test_the_command_line_of_the_start_is_read_again_in_its_folder(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    given = resolve(("--resume", "--run-id", "big", "--quiet", "--no-progress"), {})
    run_dir, run = take_named(given, state_dir)
    assert isinstance(run, ResumedRun)
    line = line_of(run, given, {"ELASTICRUN_MAX_NP": "9"})
    run_dir.leave()
    assert Path.cwd() == state_dir.parent
    assert (line.command, line["num_proc"], line["max_np"]) == (("train.py",), 2, None)
    assert line.options.quiet
    assert line.options.no_progress


def test_a_result_is_shown_with_its_status(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(state_dir, "big")
    run_dir.events_file.write_text(END)
    run_dir.lock.path.unlink()
    assert cli.main(("--resume", "--run-id", "big", "--state-dir", str(state_dir))) == 3
    assert "run big is over since 1970-01-01" in capsys.readouterr().err


# ---- a damaged journal -------------------------------------------------------------------


def refuse(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a resume is refused."""
    before = sorted(os.listdir(state_dir / "big"))
    assert cli.main(("--resume", "--run-id", "big", "--state-dir", str(state_dir))) == 64
    assert sorted(os.listdir(state_dir / "big")) == before
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"no database" * 500,
        lambda content: content[:100] + b"\xff" * (len(content) - 100),
        lambda content: content[: len(content) // 2],
    ],
)
def test_a_torn_or_corrupt_journal_is_one_line_and_nothing_is_changed(
    state_dir: Path, capsys: pytest.CaptureFixture[str], damage: object
) -> None:
    journal = RunDir(state_dir, "big").journal_file
    damaged: bytes = damage(journal.read_bytes())  # type: ignore[operator]
    journal.write_bytes(damaged)
    said = refuse(state_dir, capsys)
    assert "run big cannot go on, and its workers may train: wait until its agents have" in said
    assert f"(mv {state_dir}/big {state_dir}/big.damaged), and begin it again" in said
    assert journal.read_bytes() == damaged


def test_a_driver_that_died_before_the_job_began_leaves_nothing_to_go_on_with(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = RunDir(state_dir, "big").journal_file
    journal.write_bytes(b"")
    assert "there is no run big in" in (said := refuse(state_dir, capsys))
    assert "To begin it, give its command, too" in said
    assert journal.read_bytes() == b""


STARTED = "".join(
    f'{{"n": {n}, "t": {n}.0, "event": "{name}"}}\n'
    for n, name in enumerate(("job_started", "agent_started", "worker_started"), 1)
)


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_journal_that_is_gone_begins_no_job_anew_whose_agents_were_started(
    state_dir: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None]
) -> None:
    """They may live, and train on: a second world would train beside them."""
    run_dir = RunDir(state_dir, "big")
    harm(run_dir.journal_file)
    run_dir.events_file.write_text(END + STARTED)
    said = refuse(state_dir, capsys)
    assert "though the job has started agents; run big cannot go on" in said
    for argv in (START, ("--resume", *START)):
        with folder(state_dir) as again, pytest.raises(UsageError, match="has started agents"):
            take_unfinished(resolve(argv, {}), again, str(state_dir.parent))
    assert run_dir.events_file.read_text() == END + STARTED
    for over in ("job_started", "job_failed"):
        run_dir.events_file.write_text(STARTED + f'{{"t": 4.0, "event": "{over}"}}\n')
        with folder(state_dir) as again:
            assert take_unfinished(resolve(START, {}), again, str(state_dir.parent)) is None


STARTED_ON_A = (
    '{"n": 1, "t": 1.0, "event": "job_started"}\n'
    '{"n": 2, "t": 2.0, "event": "agent_started", "host": "a"}\n'
)


def test_a_run_whose_lock_is_gone_is_not_over(state_dir: Path) -> None:
    run_dir = RunDir(state_dir, "big")
    job = Job(Settings())
    job.handle(HostsDiscovered((("a", 1),)), 1.0)
    job.handle(AgentReady("a", 1, 7, "10.0.0.1", ()), 2.0)
    begin_journal(run_dir, str(state_dir.parent), job)
    run_dir.events_file.write_text(STARTED_ON_A)
    run_dir.lock.path.unlink()
    with folder(state_dir) as again:
        found = take_unfinished(resolve(START, {}), again, str(state_dir.parent))
        assert isinstance(found, ResumedRun)


def test_a_journal_that_ends_before_the_agents_would_begin_anew_beside_them(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDir(state_dir, "big").events_file.write_text(STARTED_ON_A)
    assert "the journal ends before the agents on a; run big" in refuse(state_dir, capsys)


def test_the_lock_says_that_the_job_had_begun_when_all_else_is_gone(state_dir: Path) -> None:
    run_dir = RunDir(state_dir, "big")
    run_dir.take()
    run_dir.job_begins()
    run_dir.leave()
    run_dir.journal_file.unlink()
    for _ in range(2):  # a driver that only looks does not change that
        with folder(state_dir) as again, pytest.raises(UsageError, match="has started agents"):
            take_unfinished(resolve(START, {}), again, str(state_dir.parent))
    run_dir.create()  # the job is begun anew
    run_dir.leave()
    with folder(state_dir) as again:
        assert take_unfinished(resolve(START, {}), again, str(state_dir.parent)) is None


def test_agents_that_live_here_are_named_when_every_file_is_gone(
    state_dir: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(state_dir, "big")
    shutil.rmtree(run_dir.path)
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "agent.py").write_text("print(flush=True); input()")
    environ = {**os.environ, contract.JOB_MARK: str(run_dir.token_file)}
    argv = (sys.executable, "-m", "launcher.agent")
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, env=environ, stdin=pipe, stdout=pipe) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        for argv in (START, ("--resume", *START)):
            with folder(state_dir) as again, pytest.raises(UsageError) as refused:
                take_unfinished(resolve(argv, {}), again, str(state_dir.parent))
            assert f"end its agents (kill {agent.pid}), and begin it again" in str(refused.value)
            assert not run_dir.path.exists(), "nothing is changed"
        agent.kill()
    with folder(state_dir) as again:
        assert take_unfinished(resolve(START, {}), again, str(state_dir.parent)) is None


def test_after_a_restart_of_the_machine_nothing_of_the_job_lives(state_dir: Path) -> None:
    run_dir = RunDir(state_dir, "big")
    run_dir.journal_file.write_bytes(b"")
    run_dir.events_file.write_text(STARTED)
    holder = msgspec.structs.replace(Holder.this_process(), boot_id="another", pid=1)
    run_dir.lock.path.write_bytes(msgspec.json.encode(holder) + b"\n")
    with folder(state_dir) as again:
        assert take_unfinished(resolve(START, {}), again, str(state_dir.parent)) is None


def test_a_journal_of_another_version_is_named(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(RunDir(state_dir, "big").journal_file)) as database:
        database.execute("PRAGMA user_version=1")
    assert "use the version of elastic-driver that wrote it" in refuse(state_dir, capsys)


def test_a_journal_that_may_not_be_read_is_one_line(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = RunDir(state_dir, "big").journal_file
    journal.unlink()
    journal.mkdir()
    assert "run big cannot go on" in refuse(state_dir, capsys)


@pytest.mark.timeout(20)
def test_a_folder_that_others_may_write_to_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A pipe in the place of a file would hold the command up for ever."""
    run_dir = RunDir(tmp_path / "state", "big")
    run_dir.path.mkdir(parents=True)
    run_dir.path.chmod(0o777)
    for name in ("events.jsonl", "lock", "journal.db"):
        os.mkfifo(run_dir.path / name)
    with pytest.raises(UsageError, match="other users may write to it"):
        take_unfinished(resolve(START, {}), run_dir, str(tmp_path))
    with pytest.raises(UsageError, match="other users may write to it"):
        take_named(resolve(("--resume", "--run-id", "big"), {}), tmp_path / "state")
    os.mkfifo(run_dir.path / "endpoint.json")
    assert read_endpoint(run_dir.path) is None
