"""Nodes that join by themselves, started as a user or a service would on each machine.

All on this machine, where each has a name of its own. Their processes carry the job's mark, so
that whatever a failing test leaves is killed with the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.support.job import ROOT, RunningJob, eventually


@dataclass
class Node:
    """One started `elasticrun`, and what it has said."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def said(self, text: str, within: float = 60.0) -> None:
        """Wait until it has said this on stderr."""
        eventually(lambda: text in self.stderr, within=within, what=text, context=self.context)

    def context(self) -> str:
        return f"--- node {self.process.poll()}\n{self.stdout[-1000:]}\n{self.stderr[-3000:]}"

    def wait(self, within: float = 90.0) -> int:
        """Its exit status."""
        eventually(
            lambda: self.process.poll() is not None,
            within=within,
            what="the node ends",
            context=self.context,
        )
        return int(self.process.returncode)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Nodes:
    """The nodes of one test: a folder and a mark that they share; a context manager.

    Whatever is left of them is killed at the end.
    """

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.mark = folder, f"t{uuid.uuid4().hex[:10]}"
        self._env = env
        self._started: list[Node] = []
        (folder / "steps").mkdir()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):  # what a test that has failed is shown with
            print(*(node.context() for node in self._started), sep="\n")
        for each in self._started:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait(10)
        if self._started:
            self.job(self._started[0]).close()

    def start(self, *args: str, out: str = "", **env: str) -> Node:
        """Start `elasticrun ARGS…`."""
        name = out or f"node{len(self._started)}-"
        stdout, stderr = self.folder / f"{name}stdout", self.folder / f"{name}stderr"
        full = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC", "PYTEST"))},
            "TEST_RUN_ID": self.mark,
            "STEP_RECORDS": str(self.folder / "steps"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **self._env,
            **env,
        }
        with stdout.open("ab") as to, stderr.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "launcher.cli", *args],
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=errors,
                env=full,
                cwd=self.folder,
            )
        started = Node(process, stdout, stderr)
        self._started.append(started)
        return started

    def serve(self, *args: str) -> RunningJob:
        """Start the server, under the mark as its run id; its job as a test can watch it."""
        state = str(self.folder / "state")
        names = ("--run-id", self.mark, "--state-dir", state)
        return self.job(self.start(*names, *args, out="./"))

    def job(self, server: Node) -> RunningJob:
        """The job that this node serves."""
        return RunningJob(server.process, self.mark, self.folder)
