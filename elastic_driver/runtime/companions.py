"""What runs beside a job in the driver's process, in threads of its own: a feature may have one.

The chapter `companion` of a feature has `begin(run: Run) -> Companion | None`; it is called when
the job has begun. Nothing of the job waits for a companion before its end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.runtime.event_log import EventLog


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as its companions know it."""

    run_id: str
    began: float  # unix seconds
    environ: Mapping[str, str]  # the variables of `elasticrun`
    log: EventLog
    say: Callable[[str], None]  # shows a line to the user; any thread may call it


class Companion(Protocol):
    """Something that runs beside the job."""

    @property
    def busy(self) -> bool:
        """Return whether it still does something."""

    def close(self) -> None:
        """End it, within seconds: the job is over."""
