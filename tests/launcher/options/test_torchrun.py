"""The whole command line of the installed torchrun, read from its own parser."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import run_job as job
from launcher.options.given import resolve

# A value for each flag with one; all others get "1".
VALUES = {
    "--rdzv-backend": "etcd",
    "--rdzv-endpoint": "127.0.0.1:0",
    "--rdzv-conf": "timeout=30,join_timeout=60,last_call_timeout=1,read_timeout=60,is_host=1",
    "--event-log-handler": "console",
    "--logs-specs": "default",
    "--log-dir": "{tmp}/logs",
    "--master-addr": "127.0.0.1",
    "--local-addr": "127.0.0.1",
    "--signals-to-handle": "SIGTERM,SIGINT,SIGUSR1",
    "--duplicate-stdout-filters": "apple,orange",
    "--duplicate-stderr-filters": "apple,orange",
    "--rdzv-id": "torchrun-flags",
}


def torchruns_flags() -> list[argparse.Action]:
    from torch.distributed.run import get_args_parser

    return [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]


@pytest.fixture(scope="module")
def flags() -> list[argparse.Action]:
    return torchruns_flags()


def words_of(action: argparse.Action, spelling: str, tmp: Path) -> list[str]:
    if action.nargs == 0:
        return [spelling]
    value = VALUES.get(action.option_strings[0], str((action.choices or ["1"])[0]))  # type: ignore[index]
    return [spelling, value.format(tmp=tmp)]


def test_every_flag_of_torchrun_is_taken_in_all_spellings(
    flags: list[argparse.Action],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("")
    assert len(flags) > 25
    for action in flags:
        for spelling in action.option_strings:
            words = words_of(action, spelling, tmp_path)
            forms = [words, ["=".join(words)]] if spelling.startswith("--") else [words]
            for form in forms:
                is_module = "--module" in action.option_strings
                command = "json.tool" if is_module else str(script)
                size = [] if "--nproc-per-node" in form[0] else ["--nproc-per-node", "1"]
                nodes = [] if "--nnodes" in form[0] else ["--nnodes", "1"]
                argv = [*nodes, *size, *form, "--state-dir", str(tmp_path), "--dry-run", command]
                assert job.run(argv) == 0, form
                shown = capsys.readouterr().out
                assert shown.startswith("command  "), form
                assert command in shown.splitlines()[0], form


def test_a_flag_that_has_no_effect_is_named_in_one_line_each(
    flags: list[argparse.Action], tmp_path: Path
) -> None:
    for action in flags:
        for spelling in action.option_strings:
            words = words_of(action, spelling, tmp_path)
            line = resolve([*words, "train.py"], {})
            assert line.command[-1] == "train.py"
            taken = [s for s in line.settings.values() if s.level]
            assert taken or line.warnings or line.command[0] == "-m", spelling
            assert all("\n" not in warning for warning in line.warnings)


def test_a_whole_torchrun_command_gives_the_same_job() -> None:
    typed = (
        "--nnodes=1:4 --nproc_per_node=8 --max_restarts=3 --rdzv_id=job7 --rdzv_backend=c10d "
        "--rdzv_endpoint=host0:29400 --rdzv_conf=join_timeout=900,last_call_timeout=5 "
        "--shutdown-timeout=20 --virtual-local-rank -r 1:1 -t 3 -m pkg.train --lr 1"
    )
    line = resolve(typed.split(), {})
    expected = {
        "nnodes": (1, 4),
        "nproc_per_node": 8,
        "max_restarts": 3,
        "run_id": "job7",
        "start_timeout": 900.0,
        "last_call": 5.0,
        "stop_grace": 20.0,
        "virtual_local_rank": True,
        "redirects": "1:1",
        "tee": "3",
    }
    assert {name: line[name] for name in expected} == expected
    assert line.command == ("-m", "pkg.train", "--lr", "1")
    assert not line.warnings


def test_other_keys_of_rdzv_conf_are_named() -> None:
    line = resolve(["--rdzv-conf=read_timeout=60,timeout=5,is_host=1", "train.py"], {})
    assert line["start_timeout"] == 5.0
    assert line.warnings == (
        "--rdzv-conf read_timeout, is_host is ignored: use --start-timeout, --elastic-timeout, "
        "--last-call and --heartbeat-timeout",
    )


def test_the_variables_of_torchrun_set_these_too() -> None:
    line = resolve([], {"PET_RDZV_CONF": "timeout=7,is_host=1", "PET_SHUTDOWN_TIMEOUT": "9"})
    assert (line["start_timeout"], line["stop_grace"]) == (7.0, 9.0)
    assert line.settings["start_timeout"].source == "PET_RDZV_CONF"
    ours = resolve([], {"PET_RDZV_CONF": "timeout=7", "ELASTICRUN_START_TIMEOUT": "8"})
    assert ours["start_timeout"] == 8.0


def test_a_rendezvous_of_torchrun_that_is_not_used_is_named() -> None:
    (said,) = resolve(["--rdzv-backend", "etcd-v2", "x.py"], {}).warnings
    assert said.startswith("--rdzv-backend etcd-v2 is not used: the job has its own rendezvous")
    assert not resolve(["--rdzv-backend", "c10d", "x.py"], {}).warnings


def test_a_module_may_be_announced_before_other_options() -> None:
    line = resolve(["-m", "-np", "2", "pkg.train", "-v"], {})
    assert (line["num_proc"], line.command) == (2, ("-m", "pkg.train", "-v"))


def test_run_path_runs_a_script_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("import os; print('local rank', os.environ['LOCAL_RANK'])\n")
    argv = [sys.executable, "-m", "launcher.cli", "--run-path", "-np", "2", "--virtual-local-rank"]
    argv += ["--state-dir", str(tmp_path), "--warm=0", str(tmp_path / "train")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:local rank 0",
        "[1]<stdout>:local rank 0",
    ]
