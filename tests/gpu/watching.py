"""What the tests on a GPU look for: the next step, equal numbers, the workers' last words."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from tests.support.job import RunningJob, eventually


def next_step_of(job: RunningJob, pids: set[int], after: float, within: float = 60.0) -> float:
    """Seconds from `after` until the last of these has finished a step in a newer round."""
    before = max(record.round for record in job.steps() if record.t <= after)

    def look() -> float | None:
        first: dict[int, float] = {}
        for record in job.steps():
            if record.round > before and record.pid in pids:
                first.setdefault(record.pid, record.t)
        return max(first.values()) - after if set(first) == pids else None

    what = "every survivor has finished a step in the next round"
    return eventually(look, within=within, what=what, context=job.describe)


def event_after(job: RunningJob, name: str, t: float, within: float = 60.0) -> dict[str, Any]:
    """The first event of this name after that time; it is waited for without a pause."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        for event in job.events(name):
            if event["t"] > t:
                return event
        time.sleep(0.001)
    raise AssertionError(f"not within {within} s: the event {name}\n{job.describe()}")


def written(job: RunningJob, folder: str) -> dict[str, list[dict[str, Any]]]:
    """What each worker has written into a folder of the job; its last line may be a half."""
    found = {}
    for path in (job.folder / folder).iterdir():
        whole = [x for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]
        found[path.name] = [json.loads(line) for line in whole]
    return found


def agreed(job: RunningJob, folder: str) -> dict[int, set[str]]:
    """By step, what workers wrote into a folder after it: one thing, if all had the same.

    The last step of one that was killed does not count: the others may have done it again.
    """
    killed = {record.worker for record in job.steps() if record.pid in job.killed}
    found: dict[int, set[str]] = {}
    for worker, lines in written(job, folder).items():
        for line in lines[: -1 if worker in killed else None]:
            rest = {name: value for name, value in line.items() if name != "of"}
            found.setdefault(line["step"], set()).add(json.dumps(rest))
    assert found
    return found


def assert_equal_everywhere(job: RunningJob) -> None:
    """After each tenth step all workers held the same numbers, bit for bit, and finite ones."""
    found = agreed(job, "digests")
    assert {step: said for step, said in found.items() if len(said) > 1} == {}
    assert not any("not finite" in next(iter(said)) for said in found.values())


def last_words(job: RunningJob) -> list[dict[str, str]]:
    """What each worker said at its end."""
    lines = [line for line in job.stdout.splitlines() if "done step=" in line]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


def seconds(values: list[float]) -> str:
    """Seconds, for people."""
    return " ".join(f"{value:.2f}" for value in values) + " s"
