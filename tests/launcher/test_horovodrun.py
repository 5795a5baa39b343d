"""The command `horovodrun`, where no other one is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from launcher import horovodrun
from launcher import run_job as job


def test_it_is_elasticrun_with_horovods_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(job, "run", lambda argv: given.append(argv) or 7)
    assert horovodrun.main(["-np", "2", "python", "train.py"]) == 7
    assert given == [["--horovod", "-np", "2", "python", "train.py"]]
    assert horovodrun.install(tmp_path) == 0
    assert horovodrun.install(tmp_path) == 0  # its own one may be written again
    for command in ([str(tmp_path / "horovodrun")], [sys.executable, "-m", "launcher.horovodrun"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("elasticrun ")


def test_another_one_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "horovodrun").write_text("#!/bin/sh\n")
    (other / "horovodrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    for folder in (other, tmp_path):
        with pytest.raises(UsageError, match="another horovodrun"):
            horovodrun.install(folder)
    assert (other / "horovodrun").read_text() == "#!/bin/sh\n"
    assert not (tmp_path / "horovodrun").exists()


def test_nothing_is_written_where_horovod_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovodrun, "_is_there", lambda _: True)
    with pytest.raises(UsageError, match="Horovod is installed"):
        horovodrun.install(tmp_path)
    assert list(tmp_path.iterdir()) == []
