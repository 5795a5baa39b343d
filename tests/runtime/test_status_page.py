"""docs/status.md explains every key of the status document."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from elastic_driver.job import status
from elastic_driver.words import progress as measured

PAGE = Path(__file__).parents[2] / "docs" / "status.md"


def keys_explained() -> dict[str, set[str]]:
    """The keys in code font, by the heading that they stand below."""
    _, *parts = PAGE.read_text().split("\n## ")
    return {part.partition("\n")[0]: set(re.findall(r"`(\w+)`", part)) for part in parts}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("The run", status.JobStatus),
        ("A worker: `members`", status.MemberStatus),
        ("A host: `hosts`", status.HostStatus),
        ("Counters: `counters`", status.CounterStatus),
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
