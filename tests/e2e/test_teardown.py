"""A worker that has left in good order may take its time to end."""

from __future__ import annotations

from tests.support.job import JOBS, elasticrun

HEARTBEAT_S = 1.5


def test_a_worker_that_has_left_is_not_taken_for_hung_while_it_ends() -> None:
    args = ("-np", "2", "--heartbeat-timeout", str(HEARTBEAT_S), "--", str(JOBS / "lingers.py"))
    with elasticrun(*args, env={"LINGER": str(2 * HEARTBEAT_S)}) as job:
        assert job.wait(90) == 0, job.describe()
        assert job.stdout.count("ended by itself") == 2
        assert not job.events("worker_hung")
