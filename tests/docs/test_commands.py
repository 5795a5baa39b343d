"""Every command that a page types into a terminal runs here, in the order of the page.

`tests.support.pages` says how a page is read. The commands run in a copy of `examples/tutorial`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.job import ROOT, eventually
from tests.support.pages import Block, blocks_of
from tests.support.processes import kill_all, processes_with, select
from tests.support.shell import DEADLINE_S, Shell, show_on_terminal

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page, ROOT)]
TYPED = [b for b in BLOCKS if b.language == "console" and "tested by" not in b.remarks]
# Some plain scripts end so under torchrun, after all their work: torch 2.13 does it, without us.
ABORTED = "terminate called without an active exception"


class Reader:
    """Somebody who types the commands of one page."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"TEST_RUN_ID={uuid.uuid4().hex}"
        self._folder = folder
        bin_folder = Path(sys.executable).parent
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC", "PYTEST"))},
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder.parent / "state"),
            "OMP_NUM_THREADS": "1",
            "TEST_RUN_ID": self._mark.partition("=")[2],
        }
        self._shells: dict[str, Shell] = {}
        self._expected: dict[str, tuple[str, int]] = {}  # in other terminals: command, status
        self._begun = False  # a job was begun there, which may not train yet

    def type(self, block: Block) -> None:
        """Type the commands of a block; those of the reader's main terminal are waited for."""
        terminal = block.remarks.get("terminal", "")
        if terminal in self._expected:
            self._finish(terminal)
        if terminal not in self._shells:
            self._shells[terminal] = Shell(self._folder, self._environ, terminal or "main")
        shell = self._shells[terminal]
        *first, last = block.commands
        for command in (*first, last):
            said = f"{block.place}: {command}"
            status = int(block.remarks.get("exit", 0)) if command is last else 0
            if not terminal and self._begun:
                self._await_training(said)
                self._begun = False
            whole = self._filled_in(command)
            if "keys" in block.remarks:
                ended = show_on_terminal(whole, block.remarks["keys"], self._folder, self._environ)
            else:
                shell.type(whole)
                if terminal and command is last:
                    self._expected[terminal] = (said, status)
                    self._begun = True
                    return
                ended = shell.wait(said)
                if ended != status and whole.startswith("torchrun") and ABORTED in shell.output:
                    shell.type(whole)
                    ended = shell.wait(said)
            assert ended == status, f"{said}\n{shell.output[-3000:]}"

    def finish(self) -> None:
        """Wait for the commands in other terminals."""
        for terminal in list(self._expected):
            self._finish(terminal)

    def close(self) -> None:
        """Leave no process behind."""
        for shell in self._shells.values():
            shell.close()
        kill_all(lambda: processes_with(self._mark))

    def _finish(self, terminal: str) -> None:
        said, status = self._expected.pop(terminal)
        shell = self._shells[terminal]
        assert shell.wait(said) == status, f"{said}\n{shell.output[-3000:]}"

    def _await_training(self, said: str) -> None:
        """Wait until the job trains that was started in another terminal."""

        def look() -> bool:
            running = [t for t in self._expected if self._shells[t].status is None]
            document = self._status()
            trains = document.get("state") == "running" and (document.get("step") or 0) > 0
            return not running or trains

        def context() -> str:
            return "\n".join(shell.output[-3000:] for shell in self._shells.values())

        eventually(look, within=DEADLINE_S, what=f"the job trains, for {said}", context=context)

    def _status(self) -> dict[str, Any]:
        argv = ["elasticctl", "status", "--json"]
        ran = subprocess.run(
            argv, env=self._environ, capture_output=True, text=True, timeout=60, check=False
        )
        with contextlib.suppress(ValueError):
            return dict(json.loads(ran.stdout) or {})  # null: the job has not begun
        return {}

    def _training(self) -> list[int]:
        """Return the process ids of the workers that train."""
        members = self._status().get("members", [])
        return [m["pid"] for m in members if m["state"] == "running" and m["pid"] > 0]

    def _filled_in(self, command: str) -> str:
        """Return the command with what a reader puts in place of the capitals."""
        if re.search(r"\bPID\b", command):
            pids = eventually(self._training, within=DEADLINE_S, what="a worker trains")
            command = re.sub(r"\bPID\b", str(pids[-1]), command)
        if re.search(r"\bDRIVER\b", command):
            driver = select(processes_with(self._mark), is_driver)[0]
            command = re.sub(r"\bDRIVER\b", str(driver.pid), command)
        return command


def is_driver(process: psutil.Process) -> bool:
    """Return whether it is the command `elasticrun`."""
    return any(word.endswith("/elasticrun") for word in process.cmdline()[:2])


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    folder = tmp_path / "clone" / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    here = Reader(folder / "tutorial")
    try:
        yield here
    finally:
        here.close()


@pytest.mark.slow
@pytest.mark.timeout(400)  # each command has a deadline of its own
@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in TYPED))
def test_the_commands_of_a_page_run_one_after_the_other(page: str, reader: Reader) -> None:
    for block in TYPED:
        if block.page == page:
            reader.type(block)
    reader.finish()


def test_the_tutorial_shows_the_script_that_it_runs() -> None:
    script = (ROOT / "examples" / "tutorial" / "train_elastic.py").read_text()
    shown = [b for b in BLOCKS if b.page == "docs/tutorial.md" and b.language == "python"]
    assert shown
    for block in shown:
        assert block.text in script, block.place
