"""Command lines, variables and configuration files written for horovodrun 0.28.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.words.orders import JobSpec
from launcher import run_job as job
from launcher.agent.environment import HOROVOD_ALIAS, common_environment
from launcher.options import table as horovod
from launcher.options.given import CommandLine, resolve, resolve_again
from launcher.options.table import OPTIONS, worker_variables
from tests.docs.test_migration import HOROVODRUNS

SHOWN = {"--version", "--check-build", "-cb"}  # show something, and start nothing
HERE = {"-H": "127.0.0.1:2", "--hosts": "127.0.0.1:2"}


def read(*argv: str, **environ: str) -> CommandLine:
    return resolve(argv, environ)


def of_workers(*argv: str, **environ: str) -> dict[str, str]:
    return worker_variables(read(*argv, **environ).options, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n")
    (tmp_path / "key").write_text("")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text("timeline:\n  filename: t.json\n")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho 127.0.0.1:2\n")
    (tmp_path / "hosts.sh").chmod(0o700)
    return tmp_path


def test_every_spelling_of_horovodrun_is_taken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {}
    for flag, words in HOROVODRUNS.items():
        if flag in SHOWN:
            assert job.carry_out(words) == 0
            continue
        value = [HERE.get(flag, word).replace("eth0", "lo") for word in words[1:]]
        given = [words[0], *value]
        try:
            assert job.carry_out(["--dry-run", *given, "train.py"]) == 0
        except UsageError as error:
            refused[flag] = str(error)
            continue
        out = capsys.readouterr().out
        if any(option.long == flag for option in horovod.IGNORED):
            assert out.count("note") == 1 + ("1 worker" in out)
            assert f"{flag} is ignored" in out
    assert refused.pop("--jsrun").startswith("--jsrun does not exist here; it starts processes")
    assert all("needs mpirun" in said for flag, said in refused.items() if flag == "--mpi")
    assert set(refused) <= {"--mpi"}  # on a machine without Open MPI
    assert read("--mpi")["backend"] == "mpi"


def test_one_line_names_all_that_was_ignored(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("autotune:\n  enabled: true\n  log_file: log.txt\n")
    line = read("--config-file", str(file), "--tcp", "--cycle-time-ms", "0.5", "--gloo", "train.py")
    assert line.warnings == (
        "--gloo, --cycle-time-ms, --autotune, --autotune-log-file, --tcp are ignored: "
        "nothing here needs them (docs/from-horovod.md)",
    )
    assert "autotune" not in line.settings


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--timeline-filename", "t.json"], "HOROVOD_TIMELINE", "t.json"),
        (["--timeline-mark-cycles"], "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
        (["--no-timeline-mark-cycles"], "HOROVOD_TIMELINE_MARK_CYCLES", "0"),
        (["--no-stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "1"),
        (["--no-stall-check", "--stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "0"),
        (["--stall-check-warning-time-seconds=9"], "HOROVOD_STALL_CHECK_TIME_SECONDS", "9"),
        (["--stall-check-shutdown-time-seconds=9"], "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "9"),
        (["--fusion-threshold-mb", "32"], "HOROVOD_FUSION_THRESHOLD", "33554432"),
        (["--gloo-timeout-seconds", "7"], "HOROVOD_GLOO_TIMEOUT_SECONDS", "7"),
        (["--log-level", "info"], "HOROVOD_LOG_LEVEL", "INFO"),
        (["--log-with-timestamp"], "HOROVOD_LOG_HIDE_TIME", "0"),
        (["--log-without-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
        (["--log-hide-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
        (["--no-log-hide-timestamp"], "HOROVOD_LOG_HIDE_TIME", "0"),
        (["--dynamic-process-sets"], "HOROVOD_DYNAMIC_PROCESS_SETS", "1"),
    ],
)
def test_workers_learn_an_option_by_horovods_variable(
    argv: list[str], name: str, value: str
) -> None:
    assert of_workers(*argv) == {name: value}


def test_flags_win_over_horovods_variables_and_these_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("logging: {level: ERROR, with_timestamp: true}\nparams: {cycle_time_ms: 1}\n")
    given = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_FUSION_THRESHOLD": "100"}
    argv = ("--config-file", str(file), "--fusion-threshold-mb=1", "train.py")
    line = read(*argv, **given)
    assert line["log_level"] == "DEBUG"
    assert line["log_with_timestamp"] is True
    assert line["fusion_threshold_mb"] == 1.0
    assert read("train.py", **given, ELASTICRUN_LOG_LEVEL="INFO")["log_level"] == "INFO"
    assert of_workers(**given)["HOROVOD_FUSION_THRESHOLD"] == "100"
    assert read(HOROVOD_START_TIMEOUT="60")["start_timeout"] == 60.0
    assert resolve_again(line.words, {}).settings == line.settings  # as a resumed job reads it


def test_horovods_sections_and_our_options_stand_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "controller: gloo\n"
        "min-np: 2\n"
        "params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 10\n  hierarchical_allreduce: true\n"
        "autotune:\n  enabled: false\n  warmup_samples:\n"
        "timeline:\n  filename: 'time line.json'\n  mark_cycles: true\n"
        "stall_check:\n  enabled: false\n  warning_time_seconds: 120\n"
        "library_options:\n  gloo_timeout_seconds: 60\n  num_nccl_streams: 2\n"
        "logging:\n  level: INFO\n  hide_timestamp: true\n"
    )
    line = read("--config-file", str(file))
    assert line["min_np"] == 2
    assert worker_variables(line.options, {}) == {
        "HOROVOD_FUSION_THRESHOLD": "33554432",
        "HOROVOD_TIMELINE": "time line.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
    named = "--gloo, --cycle-time-ms, --hierarchical-allreduce, --num-nccl-streams are ignored"
    assert next(said for said in line.warnings if "ignored" in said).startswith(named)


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--cycle-time-ms", "soon"], {}, "--cycle-time-ms needs a number from 0 on"),
        (["--cache-capacity=-1"], {}, "--cache-capacity needs a whole number of at least 0"),
        (["--autotune-gaussian-process-noise=2"], {}, "needs a number from 0 to 1, got '2'"),
        (["--log-level", "LOUD"], {}, "--log-level is one of TRACE, DEBUG"),
        (["--stall-check=perhaps"], {}, "--no-stall-check is a switch"),
        ([], {"HOROVOD_FUSION_THRESHOLD": "-5"}, "HOROVOD_FUSION_THRESHOLD: --fusion-thresh"),
        ([], {"HOROVOD_FUSION_THRESHOLD": "64MB"}, "needs a number from 0 on, got '64MB'"),
        ([], {"HOROVOD_LOG_HIDE_TIME": "maybe"}, "HOROVOD_LOG_HIDE_TIME: --log-with-timestamp"),
        ([], {"HOROVOD_DYNAMIC_PROCESS_SETS": "x"}, "is a switch: true or false, got 'x'"),
        ([], {"HOROVOD_ELASTIC_TIMEOUT": "long"}, "needs a number of seconds"),
    ],
)
def test_a_value_without_sense_is_a_usage_error(
    argv: list[str], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        resolve([*argv, "train.py"], environ)
    assert said in str(raised.value)
    assert raised.value.exit_code == 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("controller: jsrun\n", "line 1: 'controller' is one of gloo, mpi, got 'jsrun'"),
        ("params:\n  fusion_mb: 1\n", "line 2: 'fusion_mb' is not an option"),
        ("params:\n  tuning:\n    a: 1\n", "line 2: expected a plain value"),
        ("log-level: INFO\nlogging:\n  level: INFO\n", "line 3: 'level' is given twice"),
        ("timeline:\n  mark_cycles: perhaps\n", "--timeline-mark-cycles is a switch"),
    ],
)
def test_a_mistake_in_a_section_names_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        read("--config-file", str(tmp_path / "job.yaml"))
    assert said in str(raised.value)


def test_no_spelling_has_two_meanings() -> None:
    ours = {s for option in OPTIONS for s in (option.long, *option.aliases)}
    ignored = {option.long for option in horovod.IGNORED}
    assert not ours & (ignored | set(horovod.HOROVOD_OPPOSITES))
    assert not ignored & set(horovod.HOROVOD_OPPOSITES)
    assert set(horovod.HOROVOD_OPPOSITES.values()) <= ours


def test_the_alias_comes_first_on_the_path_of_workers_that_ask_for_it() -> None:
    for argv, path in (([], "/mine"), (["--horovod"], f"{HOROVOD_ALIAS}:/mine")):
        spec = read(*argv).fill(
            JobSpec, run_id="r", command=(), cwd="/", env={"PYTHONPATH": "/mine"}, max_restarts=0
        )
        assert common_environment({}, spec)["PYTHONPATH"] == path
