"""`--auto-scale` with a real job whose speed depends on the number of its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.records import JobKey, Record
from tests.e2e.test_control import ctl
from tests.support.job import JOBS, assert_no_step_lost_or_repeated, elasticrun

pytest.importorskip("scipy")
TRAIN = "--", str(JOBS / "train.py")
CURVE = {"STEPS": "1000000", "STEP_MS": "25", "CURVE": "1 1.9 1.2"}  # two workers are best
CURVE["NICE"] = "-15"  # however busy the machine is


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
    with elasticrun("-H", "localhost:3", "--auto-scale", *TRAIN, env=CURVE) as job:
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


def test_a_job_begins_where_a_finished_one_of_its_name_was_best(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from elastic_driver.brain.store.database import Database

    speeds = [SpeedAt(size=n, hosts=1, step_time=t) for n, t in ((1, 0.025), (2, 0.026), (3, 0.06))]
    kind = Kind(name="digits", command="python train.py")
    memory = 100 * 2**20  # there is more on any machine
    finished = Record(kind, speeds=tuple(speeds), memory=memory, ended=2.0, exit_code=0)
    database = Database(Address(file=str(tmp_path / "stats.db")))
    database.remember(JobKey("digits", 1.0), finished)
    line = "--run-id", "digits", "--stats-db", f"sqlite:///{tmp_path}/stats.db", "-H", "localhost:3"
    with elasticrun(*line, "--auto-scale", *TRAIN, env={**CURVE, "TEST_RUN_ID": "digits"}) as job:
        job.run_id = "digits"
        proposed = job.until(lambda: job.events("size_proposed"), "the first move")[0]
        assert proposed["wanted"] == 2
        assert "best in similar jobs (1 of them)" in proposed["reason"]
        (told,) = job.events("memory_expected")
        assert told["need"] == 1.5 * memory
        assert told["reason"] == "150 MiB, 1.5 times the largest peak of similar jobs (1 of them)"
        job.until_size(2)
        job.process.terminate()
        assert job.wait(60) == 143, job.describe()
    names = [(record.kind.name, record.exit_code) for _key, record in database.records()]
    assert names == [("digits", 0), ("digits", 143)]
    database.close()
