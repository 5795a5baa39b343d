"""Workers of an agent that was forked with its warm parent are no different from fresh ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from elastic_driver.words.orders import encode
from launcher.agent.processes import ProcessSpec, reap
from launcher.agent.warm.starter import WorkerStarter
from launcher.agent.warm.warm_plan import warm_plan_for
from tests.launcher.agent.harness import ROOT, Driver, eventually
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
    """A process that plays the agent, forked from the backend's warm parent."""

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
    argv = (*module, encode(spec).decode(), str(folder / "answers"))
    said: list[str] = []
    starter = WorkerStarter(said.append)
    answers = os.open(folder / "answers", os.O_RDWR | os.O_CLOEXEC)
    stdin, lifeline = os.pipe2(os.O_CLOEXEC)
    with agent(folder), open(answers, "rb", buffering=0) as heard:
        try:
            starter.launch(warm_plan_for(spec, os.environ))
            asyncio.run(starter.ready())
            pid = starter.start(ProcessSpec(argv, dict(os.environ), str(ROOT), 1, 2, stdin))
            os.close(stdin)
            with open(lifeline, "wb") as ask:
                yield Born(folder, ask, heard)
            eventually(lambda: reap(pid) is not None)
        finally:
            starter.close()
            driver.close()
    assert said == []


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
