"""`examples/slurm.sbatch` under a real Slurm, ended in the ways in which Slurm ends jobs.

However it ends, there is a checkpoint of the last step, which all ranks have finished; a job that
is requeued goes on from there, and has the weights of one that nobody disturbed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import slurm as real
from tests.support.job import JOBS, ROOT, eventually
from tests.support.json_lines import JsonLines
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 150
TURN_S = 150.0  # for a turn on two processors that several machines share

# In place of the example that the script runs: it reads its data with processes of a loader.
SCRIPT = """\
import os, runpy, sys
os.environ["CHECKPOINTS"] = sys.argv[sys.argv.index("--checkpoints") + 1]
runpy.run_path({job!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def running_slurm() -> Iterator[Slurm]:
    """Slurm on head, node0 and node1."""
    with real.running(2) as slurm:
        yield slurm


@pytest.fixture
def slurm(running_slurm: Slurm) -> Iterator[Slurm]:
    """The same without a job, also after a test that has failed."""
    yield running_slurm
    running_slurm.run("head", "scancel", "--signal=KILL", "--full", "--user=root")
    running_slurm.run("head", "scancel", "--user=root")
    running_slurm.until_idle(2)


@pytest.fixture(scope="module")
def undisturbed(running_slurm: Slurm) -> str:
    """The weights of a job that nobody disturbs, and that reads its data by itself."""
    batch = submit(running_slurm, loaders=0)
    batch.until(batch.is_gone, "the job is over")
    return weights(batch)


@dataclass
class Batch:
    """A job of the batch script."""

    slurm: Slurm
    folder: Path
    id: str

    @property
    def output(self) -> str:
        file = self.folder / f"elastic-{self.id}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def steps(self) -> list[int]:
        """The steps of both ranks, in the order in which they have written them down."""
        found: list[int] = []
        for file in (self.folder / "steps").glob("*.jsonl"):
            found += JsonLines(file, lambda line: int(line["step"])).read()
        return found

    def trains(self, beyond: int = 20) -> None:
        self.until(lambda: max(self.steps(), default=0) > beyond, f"it trains beyond {beyond}")

    def until(self, look: Callable[[], bool], what: str) -> None:
        eventually(look, within=TURN_S, what=what, context=lambda: self.output[-4000:])

    def is_gone(self) -> bool:
        listed = self.slurm.run("head", "squeue", "--noheader", "--states=PD,R,CG,S")
        return not listed.strip()

    def checkpoints(self) -> list[int]:
        """The steps of all checkpoints that are there."""
        folders = (self.folder / f"checkpoints-{self.id}").glob("step-*")
        return sorted(int(folder.name.split("-")[1]) for folder in folders)


def submit(slurm: Slurm, *options: str, loaders: int = 2, steps: int = STEPS) -> Batch:
    """Submit the script as users do, with one worker on each of two nodes."""
    folder = slurm.folder / f"work{len(list(slurm.folder.glob('work*')))}"
    (folder / "examples").mkdir(parents=True)
    (folder / "steps").mkdir()
    shutil.copy(ROOT / "examples" / "slurm.sbatch", folder)
    (folder / "examples" / "digits.py").write_text(SCRIPT.format(job=str(JOBS / "loader.py")))
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "STEPS": str(steps),
        "STEP_MS": "50",
        "LOADERS": str(loaders),
        "STEP_RECORDS": str(folder / "steps"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    words = ("sbatch", "--parsable", f"--chdir={folder}", "--ntasks-per-node=1", *options)
    given = [f"{name}={value}" for name, value in env.items()]
    said = slurm.run("head", *("env", *given), *words, str(folder / "slurm.sbatch"))
    return Batch(slurm, folder, said.strip())


def weights(batch: Batch) -> str:
    found = re.findall(r"done step=\d+ weights=(\w+)", batch.output)
    assert len(found) == 2, batch.output
    assert len(set(found)) == 1, batch.output
    return str(found[0])


def assert_each_step_once(batch: Batch) -> None:
    steps = batch.steps()
    assert sorted(steps) == sorted([*range(1, max(steps) + 1)] * 2), batch.output


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_cancelled_job_has_its_last_step_on_disk_and_stays_cancelled(
    slurm: Slurm, loaders: int
) -> None:
    batch = submit(slurm, loaders=loaders, steps=100_000)
    batch.trains()
    slurm.run("head", "scancel", batch.id)
    batch.until(batch.is_gone, "the job is over")
    assert_each_step_once(batch)
    assert batch.checkpoints() == [max(batch.steps())], batch.output
    assert not real.left_behind(slurm.cluster)


@pytest.mark.parametrize(
    "words",
    [
        ("scontrol", "requeue"),
        pytest.param(("scancel", "--signal=TERM"), marks=pytest.mark.night),
        pytest.param(("scancel", "--signal=TERM", "--batch"), marks=pytest.mark.night),
        ("scancel", "--signal=TERM", "--full"),
        pytest.param(("scancel", "--signal=USR1"), marks=pytest.mark.night),
    ],
    ids=" ".join,
)
def test_a_requeued_job_goes_on_as_if_nothing_had_happened(
    slurm: Slurm, undisturbed: str, words: tuple[str, ...]
) -> None:
    batch = submit(slurm)
    batch.trains()
    slurm.run("head", *words, batch.id)
    batch.until(lambda: "done step" in batch.output, "the next turn finishes")
    batch.until(batch.is_gone, "the job is over")
    assert_each_step_once(batch)
    (step,) = batch.checkpoints()
    assert batch.output.count(f"enters step={step} size=2") == 2, batch.output
    assert weights(batch) == undisturbed
