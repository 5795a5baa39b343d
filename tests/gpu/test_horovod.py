"""Horovod's API on tensors of a device."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import JOBS, ON_CPU, START_S, Note, Run, why_not
from tests.gpu.watching import agreed, last_words, seconds
from tests.support.processes import is_running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(80),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

SCRIPT = str(JOBS / "horovod_train.py")
STEPS = 150


def test_operations_and_training_with_a_kill(run: Run, note: Note) -> None:
    with run("--horovod", "-np", "3", "--min-np", "1", "--", SCRIPT, STEPS=str(STEPS)) as job:
        records = job.until(lambda: {r.pid: r for r in job.steps() if r.step >= 10}, "they train")
        job.until(lambda: len({r.pid for r in job.steps() if r.step >= 10}) == 3, "all train")
        pids = {record.pid for record in job.steps()}
        victim = max(records)
        killed_at = job.kill(victim)
        first = job.until(
            lambda: {
                r.pid: r.t - killed_at
                for r in reversed(job.steps())
                if r.pid in pids - {victim} and r.t > killed_at and r.size == 2
            },
            "the survivors train",
            START_S,
        )
        assert all(is_running(pid) for pid in pids - {victim})
        assert job.wait(60) == 0, job.describe()
        assert {step: said for step, said in agreed(job, "values").items() if len(said) > 1} == {}
        said = last_words(job)
        assert len(said) >= 2, job.describe()
        note("Horovod, kill: next step", seconds([max(first.values())]))
        note("… losses apart from those of one process", said[0]["difference"])
        assert {words["losses"] for words in said} == {str(STEPS)}
        assert all(float(words["last"]) < float(words["first"]) / 2 for words in said)
        assert all(float(words["difference"]) < 0.01 for words in said)
        assert all(("nccl" in words["backend"]) is not ON_CPU for words in said)


def test_operations_wait_for_what_a_stream_of_the_script_computes(run: Run) -> None:
    with run("--horovod", "-np", "2", "--", SCRIPT, STEPS="5", STREAM="1") as job:
        assert job.wait(60) == 0, job.describe()
