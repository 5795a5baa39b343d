"""Where workers stand that cannot say it themselves, seen with py-spy: native hangs, plain scripts.

pip install -c constraints.txt py-spy
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.test_control import ctl, here
from tests.support.job import JOBS, elasticrun

PY_SPY = shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").is_file()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PY_SPY, reason="py-spy is not installed (extra `stacks`)"),
]


def test_the_stack_of_a_worker_that_hangs_in_c_is_kept_before_it_is_killed() -> None:
    args = ("-np", "3", "--heartbeat-timeout", "6")  # its peers do not complain before that
    env = {"HANG": "native", "HANG_STEP": "20", "STEPS": "100000"}
    with elasticrun(*args, "--", str(JOBS / "hang.py"), env=env) as job:
        found = job.until(lambda: job.events("stacks_collected"), "the stacks are collected")[0]
        assert "has not been heard from for 3 s" in found["reason"]
        (odd,) = [group for group in found["stacks"] if group["odd"]]
        assert odd["ranks"] == [1]
        assert odd["where"] == "outside of collectives, seen by py-spy"
        assert "sleep_in_c_with_the_interpreter_lock" in odd["stack"]
        assert sorted(r for g in found["stacks"] if not g["odd"] for r in g["ranks"]) == [0, 2]
        shown = ctl("stacks", "--last", *here(job))
        assert "rank 1: outside of collectives, seen by py-spy, apart from the others" in shown
        assert "sleep_in_c_with_the_interpreter_lock" in shown
        lost = job.until(lambda: job.events("worker_hung"), "its lease ends, and it is killed")
        assert [event["rank"] for event in lost] == [1]


def test_of_a_plain_job_that_hangs_the_odd_one_is_shown_by_one_command() -> None:
    env = {"HANG_STEP": "3", "STEPS": "100000"}
    with elasticrun("-np", "2", "--", str(JOBS / "plain.py"), env=env) as job:
        steps = job.folder / "steps"
        job.until(lambda: len(list(steps.glob("plain.*"))) == 2, "both have made a step")

        def shown() -> str | None:
            text = ctl("stacks", *here(job))
            return text if "read_what_never_comes" in text else None

        text = job.until(shown, "rank 1 is seen in what it hangs in")
        assert "rank 1: outside of collectives, seen by py-spy, apart from the others" in text
        assert "rank 0: in a collective, seen by py-spy" in text
        assert "all_reduce" in text
