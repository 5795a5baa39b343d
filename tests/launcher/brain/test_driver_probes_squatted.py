"""Whether a driver lives is its own word alone, whoever has its liveness port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.brain.grants import JobReport, Kind
from elastic_driver.token_roles import job_token
from launcher.brain.commands import ask
from launcher.brain.setup import BrainFolder
from rendezvous.auth import read_token_file
from tests.launcher.brain.test_brain_service import Job
from tests.support.brain import RunningBrain, elasticbrain
from tests.support.job import eventually
from tests.support.liveness import Driver, driver, stranger

pytest.importorskip("scipy")
pytestmark = pytest.mark.timeout(120)
BEGAN, LIVES_ON_S = 5.0, 2.0
Watched = tuple[RunningBrain, Driver, Job]


def report(**says: object) -> JobReport:
    fields = {"began": BEGAN, "least": 2, "lives_on": LIVES_ON_S, **says}
    return JobReport(kind=Kind(name="j", command=""), **fields)  # type: ignore[arg-type]


def token_of(brain: RunningBrain, job: str) -> str:
    return job_token(read_token_file(brain.folder / "job.token"), job)


def state_of_first(brain: RunningBrain) -> tuple[str, bool] | None:
    document = json.loads(ask(BrainFolder(brain.folder)))
    jobs = [job for job in document["jobs"] if job["job"] == "first"]
    return (jobs[0]["state"], jobs[0]["watched"]) if jobs else None


def begun(brain: RunningBrain, job: Job, its_driver: Driver) -> JobReport:
    """A job has all slots, and the Brain has found its driver; return what the job says."""
    says = {"liveness": its_driver.address}
    grant = job.until(lambda g: g.hosts == {"a": 2}, report(**says))
    said = report(**says, carried_out=grant.number, holding={"a": 2})
    found(brain, job, said)
    return said


def found(brain: RunningBrain, job: Job, said: JobReport) -> None:
    def is_found() -> bool:
        job.say(said)
        return state_of_first(brain) == ("live", True)

    eventually(is_found, within=10, what="the driver is found")


def waits(brain: RunningBrain, job: Job, state: tuple[str, bool], within: float = 30) -> None:
    """A job waits until the first one has this state, and gets nothing until then."""

    def is_so() -> bool:
        job.say(report())
        grant = job.grant()
        assert grant is None or not grant.hosts
        return state_of_first(brain) == state

    eventually(is_so, within=within, what=f"first is {state}", context=lambda: str(brain.status()))


@pytest.mark.parametrize("kind", ["nobody", "silent", "garbage", "relay"])
def test_the_slots_of_a_dead_driver_are_free_whoever_has_its_port(
    tmp_path: Path, kind: str
) -> None:
    with (
        elasticbrain(tmp_path, "-H", "a:2") as brain,
        driver(token_of(brain, "other"), BEGAN) as other,
        driver(token_of(brain, "first"), BEGAN) as its_driver,
    ):
        first, second = Job(brain, "first"), Job(brain, "second")
        begun(brain, first, its_driver)
        its_driver.kill()
        if kind == "nobody":
            second.until(lambda g: g.hosts == {"a": 2}, report())
            return
        says = b"HTTP/1.1 200 OK\r\n\r\n" * 100 if kind == "garbage" else b""
        relays_to = other.port if kind == "relay" else 0
        with stranger(its_driver.port, says, relays_to) as squatter:
            second.until(lambda g: g.hosts == {"a": 2}, report())
            assert squatter.asked, "the Brain has looked there"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A Brain that watches the driver of `first`, which has all slots; and a second job."""
    with (
        elasticbrain(tmp_path, "-H", "a:2") as brain,
        driver(token_of(brain, "first"), BEGAN) as its_driver,
    ):
        begun(brain, Job(brain, "first"), its_driver)
        yield brain, its_driver, Job(brain, "second")


def test_a_driver_that_is_stopped_keeps_its_slots_until_it_has_ended(watched: Watched) -> None:
    brain, its_driver, second = watched
    its_driver.stop()
    waits(brain, second, ("silent", True))
    its_driver.kill()
    second.until(lambda g: g.hosts == {"a": 2}, report())


def test_a_brain_that_starts_again_finds_the_drivers_that_live_and_no_others(
    watched: Watched,
) -> None:
    brain, its_driver, second = watched
    brain.kill()
    brain.start_again()
    waits(brain, second, ("silent", True))  # it is found, although it is not heard
    brain.kill()
    its_driver.kill()
    with stranger(its_driver.port):
        brain.start_again()
        second.until(lambda g: g.hosts == {"a": 2}, report())


def test_a_driver_that_is_resumed_at_another_port_is_watched_there(tmp_path: Path) -> None:
    with (
        elasticbrain(tmp_path, "-H", "a:2") as brain,
        driver(token_of(brain, "first"), BEGAN) as before,
    ):
        first, second = Job(brain, "first"), Job(brain, "second")
        said = begun(brain, first, before)
        before.kill()
        with stranger(before.port), driver(token_of(brain, "first"), BEGAN) as later:
            found(brain, first, report(**{**fields_of(said), "liveness": later.address}))
            waits(brain, second, ("silent", True))
            later.kill()
            second.until(lambda g: g.hosts == {"a": 2}, report())


def fields_of(said: JobReport) -> dict[str, object]:
    return {name: getattr(said, name) for name in ("carried_out", "holding")}
