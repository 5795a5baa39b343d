"""What a job with kills has trained is what one process trains: losses, step for step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.conftest import JOBS, ON_CPU, START_S, Note, Run, why_not
from tests.gpu.watching import agreed, last_words, next_step_of, seconds
from tests.support.job import assert_no_step_lost_or_repeated
from tests.support.processes import is_running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

VALUES = str(JOBS / "values.py")
STEPS = 200
INIT_SCALE, GROWS_AFTER = 2.0**12, 6  # of the script's scaler


def train(
    run: Run, note: Note, what: str, kills: int = 2, start_s: float = START_S, **env: str
) -> dict[int, dict[str, Any]]:
    """Train with kills; return what all have written down, by step.

    The survivors keep their processes, and all end with the same losses, those of one process.
    """
    took = []
    with run("-np", "3", "--min-np", "1", "--", VALUES, STEPS=str(STEPS), **env) as job:
        for _ in range(kills):
            pids = set(job.until_size(3, start_s, steps=5))
            victim = max(pids)
            killed_at = job.kill(victim)
            took.append(next_step_of(job, pids - {victim}, killed_at))
            assert all(is_running(pid) for pid in pids - {victim})
        assert job.wait(60) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, STEPS)
        found = agreed(job, "values")
        assert {step: said for step, said in found.items() if len(said) > 1} == {}
        said = last_words(job)
        assert len(said) == 3, job.describe()
        assert {words["losses"] for words in said} == {str(STEPS)}
        assert all(float(words["last"]) < float(words["first"]) / 2 for words in said)
        note(f"{what}, kills: next step", seconds(took))
        note("… losses apart from those of one process", said[0]["difference"])
        tolerance = 0.05 if "scaler" in env.get("WITH", "") else 0.01
        assert all(float(words["difference"]) < tolerance for words in said)
        nccl = not ON_CPU and "BACKEND" not in env
        assert all(("nccl" in words["backend"]) is nccl for words in said)
        return {step: json.loads(next(iter(said))) for step, said in found.items()}


def test_a_stream_of_its_own(run: Run, note: Note) -> None:
    train(run, note, "side stream", WITH="stream")


@pytest.mark.timeout(150)
def test_a_compiled_model(run: Run, note: Note) -> None:
    train(run, note, "torch.compile", kills=1, start_s=90, WITH="compile")


def test_tensors_of_the_device_over_gloo(run: Run, note: Note) -> None:
    train(run, note, "over gloo", BACKEND="gloo", WIDTH="512" if ON_CPU else "2048")


def test_a_step_that_the_scaler_skips_for_a_lost_peer_is_never_committed(
    run: Run, note: Note
) -> None:
    """It skips exactly the steps whose loss is infinite, so what was cut off never counts.

    The model is large enough for kills to fall into the all-reduce.
    """
    width = "512" if ON_CPU else "4096"
    found = train(run, note, "GradScaler", kills=4, WITH="scaler", WIDTH=width, STEP_MS="10")
    scale, grown, updates = INIT_SCALE, 0, 0
    for step in range(1, STEPS + 1):
        if (step - 1) % 10 == 7:
            scale, grown = scale / 2, 0
        else:
            updates, grown = updates + 1, grown + 1
            if grown == GROWS_AFTER:
                scale, grown = scale * 2, 0
        seen = found[step]
        assert (seen["updates"], seen["scale"]) == (updates, scale), (step, seen)


def test_a_training_thread_that_hangs_while_others_wait_for_the_device(
    run: Run, note: Note
) -> None:
    limit = 3.0
    args = ("-np", "3", "--min-np", "1", "--hang-timeout", str(limit), "--", VALUES)
    with run(*args, STEPS="100", WITH="hang") as job:
        mark = job.folder / "hung"
        pids = set(job.until_size(3, START_S, steps=5))
        job.until(lambda: mark.exists() and mark.read_text(), "rank 1 hangs", START_S)
        victim, since = mark.read_text().split()
        took = next_step_of(job, pids - {int(victim)}, float(since))
        note("a rank that hangs: next step", f"{took - limit:+.2f} s beyond --hang-timeout")
        assert took < limit + 10
        assert all(is_running(pid) for pid in pids - {int(victim)}), job.describe()
        assert job.wait(60) == 0, job.describe()
        assert all(float(words["difference"]) < 0.01 for words in last_words(job))
