"""`--auto-scale` with a real job whose speed depends on the number of its workers."""

from __future__ import annotations

import pytest

from tests.e2e.test_control import ctl
from tests.support.job import JOBS, assert_no_step_lost_or_repeated, elasticrun

pytest.importorskip("scipy")
TRAIN = "--", str(JOBS / "train.py")


@pytest.mark.timeout(300)
def test_a_batch_that_grows_counts_for_what_it_teaches() -> None:
    """With so little noise one worker learns the most; three take the most samples."""
    knobs = {"STEP_MS": "25", "NOISE": "0.1"}
    train = "--", str(JOBS / "noisy.py")
    with elasticrun("-H", "localhost:3", "--auto-scale", *train, env=knobs) as job:
        found = job.until(lambda: job.events("size_found"), "the end of the search", 200)[0]
        assert found["noise"] == pytest.approx(0.1, rel=0.2), found
        assert found["size"] == 1, found
        job.until(lambda: job.events("size_proposed")[-1]["wanted"] == 1, "the move")
        ctl("stop", "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id)
        job.wait()
        job.assert_nothing_left()


@pytest.mark.timeout(300)
def test_it_finds_the_best_size_and_a_user_outranks_it() -> None:
    curve = {"STEPS": "1000000", "STEP_MS": "25", "CURVE": "1 1.9 1.2"}
    with elasticrun("-H", "localhost:3", "--auto-scale", *TRAIN, env=curve) as job:
        found = job.until(lambda: job.events("size_found"), "the end of the search", 200)[0]
        assert found["size"] == 2, found
        job.until(lambda: len(job.events("size_proposed")) == 3, "the move to it")
        assert [event["wanted"] for event in job.events("size_proposed")] == [2, 3, 2]
        job.until_size(2)
        where = "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id
        ctl("scale", "1", *where)
        job.until_size(1)
        ctl("scale", "auto", *where)
        job.until_size(2)
        last = min(record.step for record in job.live().values())
        ctl("stop", *where)
        job.wait()
        job.assert_nothing_left()
        assert_no_step_lost_or_repeated(job, last)
