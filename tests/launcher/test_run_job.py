"""The facts of this machine, as a plan is told them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_driver.contract import VISIBLE_DEVICES
from elastic_driver.errors import UsageError
from launcher.launch.host_source import Facts
from launcher.options.given import resolve
from launcher.run_job import collect_facts, read_hostfile, this_machine, with_allocation


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the hostfile .*: No such file"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="UTF-8"):
        read_hostfile(str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("visible", "gpus"), [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-abc", 1)]
)
def test_visible_gpus_are_counted_as_cuda_does(visible: str, gpus: int) -> None:
    assert this_machine({"CUDA_VISIBLE_DEVICES": visible}).gpus == gpus


@pytest.mark.parametrize("name", VISIBLE_DEVICES)
def test_accelerators_of_all_makers_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glob.glob", lambda files: ["a", "b"] if "davinci" in files else [])
    assert this_machine({}).gpus == 2
    assert this_machine({name: "0,1,3"}).gpus == 3
    assert this_machine({name: ""}).gpus == 0


def test_cores_are_those_this_process_may_use() -> None:
    assert this_machine({}).cpus == len(os.sched_getaffinity(0))


# ---- what Slurm says of the job we run in ------------------------------------------------


def in_slurm(tmp_path: Path, *argv: str) -> Facts:
    environ = {"SLURM_JOB_ID": "17", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    line = resolve([*argv, "--", "train.py"], environ)
    return with_allocation(line, replace(collect_facts(line, environ), environ=environ))


@pytest.mark.parametrize("argv", [(), ("--backend", "slurm", "-H", "n1:1")])
def test_scontrol_is_asked_for_the_job(tmp_path: Path, argv: tuple[str, ...]) -> None:
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\ntest "$*" = "show job --details 17" && echo JobId=17\n')
    program.chmod(0o755)
    assert in_slurm(tmp_path, *argv).allocation_text == "JobId=17\n"


@pytest.mark.parametrize("argv", [("--standalone",), ("-H", "a:2"), ("--backend", "ssh")])
def test_scontrol_is_not_asked_where_agents_start_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    assert in_slurm(tmp_path, *argv).allocation_text == ""
    assert capfd.readouterr().err == ""


def test_a_scontrol_that_does_not_answer_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert in_slurm(tmp_path).allocation_text == ""
    assert capfd.readouterr().err == (
        "elasticrun: scontrol exited with status 3; what Slurm job 17 has of its nodes is read "
        "from SLURM_* variables, which do not show all GPUs\n"
    )
