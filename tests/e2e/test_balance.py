"""A worker that is slowed for real gets less to do, in mid-epoch; no bit of the result changes."""

from __future__ import annotations

import re

import pytest

from tests.e2e.test_exact import EXACT, alone, result_of
from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.slowing import slowed

SHARE = 0.08  # of a processor: several times slower, also beside busy neighbours
WORK = {"MODE": "fixed", "WORK_MS": "2", "STEP_MS": "0"}
INTERRUPTED = str(JOBS / "exact_interrupted.py")


def shares_of(job: RunningJob, rank: int) -> list[int]:
    """This rank's share of full steps, in the order in which it changed."""
    return [int(share) for share in re.findall(rf"\[{rank}\]<stdout>:share (\d+)", job.stdout)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_work_moves_away_from_a_slowed_worker_and_the_result_stays_the_same() -> None:
    hosts = "localhost:1,127.0.0.2:1"
    args = ("-H", hosts, "-np", "2", "--virtual-workers", "8", "--balance", "--", EXACT)
    with elasticrun(*args, env=WORK) as job:
        workers = job.until_size(2, steps=4)
        (victim,) = (r for r in workers.values() if r.rank == 1)
        with slowed(victim.pid, SHARE):
            event = job.until(
                lambda: next(iter(job.events("work_moved")), None), "work is moved", within=90.0
            )
            job.until(lambda: len(shares_of(job, 1)) > 1, "the workers have taken it over")
        assert (event["rank"], event["host"]) == (1, "127.0.0.2")
        assert shares_of(job, 1)[0] == 4
        assert shares_of(job, 1)[1] < 4 < shares_of(job, 0)[1]
        assert "work is shared anew" in job.stderr
        assert job.wait(100) == 0, job.describe()
        assert result_of(job.stdout) == alone("fixed")


@pytest.mark.slow
def test_rank_0_may_die_while_it_passes_shares_on() -> None:
    args = ("-np", "2", "--min-np", "1", "--virtual-workers", "8", "--balance", "--", INTERRUPTED)
    with elasticrun(*args, env={"MODE": "fixed", "STEP_MS": "5"}) as job:
        assert job.wait(60) == 0, job.describe()
        died = [e for e in job.events("worker_exited") if e["exit_code"] == -9]
        assert [(e["rank"], e["round"]) for e in died] == [(0, 1)], job.describe()
        assert job.events("worker_hung", "worker_lost") == []
        assert result_of(job.stdout) == alone("fixed")
