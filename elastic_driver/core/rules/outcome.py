"""Verdicts: when failures end the job, and with which exit status.

Pure functions over the failures of a round, and the budget of restarts. Called by the job
machine; never changes a worker or a round. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastic_driver.core.documents import Failure
from elastic_driver.settings import Settings

KILLED = -9  # the status of a worker that died with its agent, or is killed for hanging


class Kind(str, Enum):
    """What the script turned out to be, by what it does."""

    UNDECLARED = "undeclared"
    ELASTIC = "elastic"
    PLAIN = "plain"


class Cause(str, Enum):
    """What brought a worker down."""

    OWN = "own"  # a non-zero exit status of its own
    SIGNAL = "signal"
    VICTIM = "victim"  # it fell because a peer was lost
    HUNG = "hung"
    AGENT = "agent"  # its agent was lost, and it died with it


@dataclass(frozen=True, slots=True)
class Loss:
    """One worker's failure."""

    failure: Failure
    cause: Cause
    reason: str
    member: bool  # it was in the round, or one of those the round was waiting for

    @property
    def fatal_alone(self) -> bool:
        """Whether a job whose workers all fall like this has failed by its own doing."""
        return self.cause is Cause.OWN


def cause_of(exit_code: int, *, victim: bool) -> Cause:
    """What an exit says about its cause; negative codes are signals."""
    if victim:
        return Cause.VICTIM
    return Cause.SIGNAL if exit_code < 0 else Cause.OWN


def exit_status(failure: Failure | None) -> int:
    """The job's exit status for this failure: the worker's own, or 128 + its signal."""
    if failure is None or failure.exit_code == 0:
        return 1
    return 128 - failure.exit_code if failure.exit_code < 0 else failure.exit_code


def first_failure(losses: Sequence[Loss]) -> Failure | None:
    """The failure a round is judged by: the first one that is not a peer's consequence."""
    for loss in losses:
        if loss.cause is not Cause.VICTIM:
            return loss.failure
    return losses[0].failure if losses else None


def failed_by_itself(losses: Sequence[Loss], *, kind: Kind, fruitful: bool) -> bool:
    """Whether losing all members this way means that the script fails, not the machines.

    An elastic job of which nobody ever finished a step has failed when every worker died,
    however, unless all of them died with their agents. Any other job has failed when every
    member exited non-zero by itself.
    """
    members = [loss for loss in losses if loss.member]
    if kind is Kind.ELASTIC and not fruitful:
        return any(loss.cause is not Cause.AGENT for loss in members)
    return bool(members) and all(loss.fatal_alone for loss in members)


class Budget:
    """How many failures the job may still survive.

    With `max_restarts` given, every failure counts. Without, only fruitless ones: failures
    in a row with no step finished in between, those within `settle` seconds of each other
    being one (a host's eight workers that die together are one incident).
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.failures = 0  # in all
        self.fruitless = 0  # incidents in a row
        self._incident_at: float | None = None

    def count(self, now: float, *, fruitless: bool, whole_round: bool = False) -> None:
        """One more failure; `fruitless`: nobody has got anywhere since the last one.

        A `whole_round` was judged as one: it is an incident of its own, however soon.
        """
        self.failures += 1
        if not fruitless:
            return
        since = None if self._incident_at is None else now - self._incident_at
        if whole_round or since is None or since >= self._settings.settle:
            self.fruitless += 1
            self._incident_at = now

    def step_finished(self) -> None:
        """The job got somewhere: the row of fruitless failures ends."""
        self.fruitless = 0
        self._incident_at = None

    def exceeded(self) -> str | None:
        """Which limit is exceeded, its value and how to raise it; None while within."""
        limit = self._settings.max_restarts
        if limit is not None:
            if self.failures <= limit:
                return None
            return (
                f"{self.failures} failures are more than the limit of {limit} restarts; "
                "raise --max-restarts"
            )
        if self.fruitless <= self._settings.fruitless_restarts:
            return None
        return (
            f"{self.fruitless} failures in a row without a finished step in between, "
            f"the limit is {self._settings.fruitless_restarts} restarts; "
            "mend the script, or allow more with --max-restarts"
        )
