"""The facts of this machine, as a plan is told them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_driver.contract import VISIBLE_DEVICES
from elastic_driver.errors import UsageError
from launcher.job import read_hostfile, this_machine


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
