"""Workers whose script builds another state than the others hold: named, not tried again."""

from __future__ import annotations

import pytest

from tests.support.job import JOBS, elasticrun

UNFIT = str(JOBS / "unfit.py")
SAID = {
    "class": "optimizer is of the class SGD, in the trained state it is Adam",
    "shape": "'weight' is float32[2, 4] here and float32[1, 4] there",
    "part": "this worker's state has the parts model, optimizer, more, the trained one model, opt",
}


@pytest.mark.parametrize("how", SAID)
def test_a_newcomer_with_another_script_is_named_and_the_survivor_trains_on(how: str) -> None:
    with elasticrun("-np", "2", UNFIT, env={"HOW": how}) as job:
        assert job.wait() == 0, job.describe()
        (event,) = job.events("worker_unfit")
        assert SAID[how] in event["reason"]
        assert f"elasticrun: worker {event['worker']} cannot take over the state" in job.stderr
        assert [e["worker"] for e in job.events("worker_started")][2:] == [event["worker"]]
        first, *others = [e["worker"] for e in job.events("worker_exited") if not e["exit_code"]]
        assert (first, others) == ("localhost.0.1", []), "it keeps its process"
        assert "done at 200" in job.stdout


def test_ranks_that_build_different_states_end_the_job_at_once() -> None:
    with elasticrun("-np", "2", UNFIT, env={"HOW": "class", "EARLY": "1"}) as job:
        assert job.wait() == 1, job.describe()
        assert len(job.events("worker_started")) == 2
        assert f"rank 1 on localhost cannot take over the state of rank 0: {SAID['class']}" in (
            job.stderr
        )
