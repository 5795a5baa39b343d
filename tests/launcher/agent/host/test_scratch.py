"""The folder for what a killed worker cannot remove."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.host.scratch import scratch_folder, sweep_scratch

HOLD = """
from launcher.agent.host.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short name, as temporary folders have."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_it_goes_with_all_that_is_in_it(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert folder is not None
        Path(folder, "listener-abcdefgh").touch()
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_where_none_can_be_made_workers_make_their_own(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 90)  # no socket's name would fit below it
    deep.mkdir()
    for folder in (deep, temporary / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with scratch_folder() as made:
            assert made is None
    assert list(deep.iterdir()) == []


def test_what_a_killed_agent_left_is_swept_and_what_a_live_one_holds_is_not(
    temporary: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        sweep_scratch()
        assert folder.is_dir()
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    sweep_scratch()
    assert list(temporary.iterdir()) == []
