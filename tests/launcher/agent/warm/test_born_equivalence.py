"""Workers of an agent that was forked with its warm parent are no different from fresh ones."""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from elastic_driver.core.documents import encode
from launcher.agent.processes import reap
from launcher.backends.base import PACKAGE_ROOT, AgentPlan
from launcher.backends.shared_parent import ForkRequest, SharedParent
from tests.launcher.agent.harness import Driver, eventually
from tests.launcher.agent.warm.harness import DEADLINE_S, Outcome, agent
from tests.launcher.agent.warm.test_equivalence import (
    ENDINGS,
    MULTIPROCESSING,
    WHO_AM_I,
    without_addresses,
    write,
)


@dataclass
class Born:
    """A process that plays the agent, forked from a shared parent."""

    folder: Path
    ask: IO[bytes]
    answers: IO[bytes]

    def compare(self, script: str, **variables: str) -> Outcome:
        """Run this job fresh and warm there; they must not differ. Returns what both did."""
        write(self.folder / "job.py", script)
        self.ask.write(json.dumps(variables).encode() + b"\n")
        self.ask.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            assert selector.select(DEADLINE_S), "no answer"
        fresh, warm, said = json.loads(self.answers.readline())
        assert said == [], "it was not a fork"
        assert without_addresses(Outcome(**warm)) == without_addresses(Outcome(**fresh))
        return Outcome(**fresh)


@contextlib.contextmanager
def forked_agent(folder: Path, *flags: str) -> Iterator[Born]:
    """An agent of `python FLAGS job.py --epochs 3`."""
    driver = Driver(folder)
    os.mkfifo(folder / "answers")
    command = (sys.executable, *flags, "job.py", "--epochs", "3")
    spec = driver.publish(*command, warm=1, preload=())
    module = (sys.executable, "-m", "tests.launcher.agent.warm.born_agent")
    plan = AgentPlan("b", 1, (*module, encode(spec).decode(), str(folder / "answers")), {})
    assert plan.cwd == PACKAGE_ROOT
    pids: list[tuple[int, int]] = []

    def born(pid: int, _warm: int, lifeline: int) -> bool:
        pids.append((pid, lifeline))
        return True

    refused: list[str] = []
    said = io.StringIO()  # what the shared parent tells people
    shared = SharedParent(driver.server.url, driver.token_file)
    answers = os.open(folder / "answers", os.O_RDWR | os.O_CLOEXEC)
    with (
        agent(folder),
        open(answers, "rb", buffering=0) as heard,
        contextlib.redirect_stderr(said),
    ):
        shared.request(ForkRequest(plan, born, lambda: refused.append("refused")))
        try:
            ((pid, lifeline),) = eventually(
                lambda: pids, DEADLINE_S, f"an agent; {said.getvalue()}"
            )
            with open(lifeline, "wb") as ask:
                yield Born(folder, ask, heard)
            eventually(lambda: reap(pid) is not None)
        finally:
            shared.close()
            driver.close()
    assert (refused, said.getvalue()) == ([], "")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Born]:
    with forked_agent(tmp_path_factory.mktemp("job")) as born:
        yield born


def test_everything_a_script_can_ask_about_itself_is_the_same(job: Born) -> None:
    outcome = job.compare(WHO_AM_I, RANK="1", ELASTIC_WORKER_ID="a.1.2")
    assert outcome.code == 0
    assert "RANK=1" in outcome.stdout
    assert "BORN_WARM" not in outcome.stdout


@pytest.mark.parametrize("source", ENDINGS.values(), ids=ENDINGS.keys())
def test_every_way_to_end_ends_the_same(job: Born, source: str) -> None:
    job.compare(source)


def test_processes_of_every_kind_can_be_made(job: Born) -> None:
    assert job.compare(MULTIPROCESSING).stdout.count("(42, ") == 3


def test_the_interpreters_flags_mean_the_same(tmp_path: Path) -> None:
    with forked_agent(tmp_path, "-OO", "-bq", "-Xutf8", "-u") as born:
        assert born.compare(WHO_AM_I + "    assert False, 'asserts count'\n").code == 0
