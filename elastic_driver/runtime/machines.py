"""All machines that a driver may run: the job, and those of the features; and what they are sent.

The chapter `machine` of a feature has its declarations (`MACHINES`), perhaps `ENDS`: decisions
after which their machine is over, and with which no next driver goes on; and `REPORTED`: events
that agents and workers post at `/v1/events`, each about its `worker`.
"""

from typing import Any

from elastic_driver.features import chapters
from elastic_driver.job import job
from elastic_driver.kernel.kernel import Catalog

# A next driver tells those that go on in this order that it has come.
MACHINES = Catalog(
    (
        job.DECLARATION,
        *(declared for chapter in chapters("machine") for declared in chapter.MACHINES),
    )
)


def _all(name: str) -> tuple[type[Any], ...]:
    return tuple(kind for chapter in chapters("machine") for kind in getattr(chapter, name, ()))


ENDS = _all("ENDS")
REPORTED = _all("REPORTED")
PASSING = {each.name for each in MACHINES if set(ENDS) & {*each.decision_types()}}
