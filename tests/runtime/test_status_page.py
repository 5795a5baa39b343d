"""docs/status.md explains every key of the status document."""

from __future__ import annotations

import re
from pathlib import Path
from queue import Queue

import msgspec
import pytest

from elastic_driver.job import status
from elastic_driver.runtime.status_document import JobDocument, RunCounters, read_status
from elastic_driver.words import progress as measured
from tests.runtime.jobs import StartJob

PAGE = Path(__file__).parents[2] / "docs" / "status.md"


def keys_explained() -> dict[str, set[str]]:
    """The keys in code font, by the heading that they stand below."""
    _, *parts = PAGE.read_text().split("\n## ")
    return {part.partition("\n")[0]: set(re.findall(r"`(\w+)`", part)) for part in parts}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("The run", JobDocument),
        ("A worker: `members`", status.MemberStatus),
        ("A host: `hosts`", status.HostStatus),
        ("Counters: `counters`", RunCounters),
        ("Slow ranks: `slow`", status.SlowStatus),
        ("Measurements: `measured`", measured.Measured),
        ("Measurements: `measured`", measured.WorkerMeasured),
        ("Measurements: `measured`", measured.StepTimes),
        ("Measurements: `measured`", measured.HostUsage),
        ("Measurements: `measured`", measured.GpuUsage),
    ],
)
def test_every_key_is_explained(heading: str, kind: type[msgspec.Struct]) -> None:
    assert not set(kind.__struct_fields__) - keys_explained()[heading]


def test_a_driver_answers_with_the_keys_of_the_type_and_no_other(start_job: StartJob) -> None:
    job = start_job((("a", 2), ("b", 1)))
    job.cluster.until_workers("a.0.1", "a.1.1", "b.0.1")
    job.cluster.ready("a.0.1", "a.1.1", "b.0.1")
    job.cluster.world(1)
    replies: Queue[bytes] = Queue()
    job.driver.ask_status(replies.put)
    answered = replies.get(timeout=10.0)
    document = read_status(answered)
    assert isinstance(document, JobDocument)
    assert msgspec.json.decode(msgspec.json.encode(document)) == msgspec.json.decode(answered)
