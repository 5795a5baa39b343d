"""The Brain's jobs get what similar jobs have measured, from databases of both kinds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("sqlalchemy")

from elastic_driver.brain.algorithm import JobView, SpeedAt, View
from elastic_driver.brain.grants import Grant, JobReport, Kind, grant_key, lease_key
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import JobKey, Record
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.token_roles import job_token
from launcher.brain import statistics_reader as module
from launcher.brain.statistics_reader import Priors
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient
from tests.support.brain import elasticbrain
from tests.support.job import eventually

KIND = Kind(name="mnist", command="c", parameters=7)
SPEEDS = (SpeedAt(size=1, hosts=1, step_time=1.0), SpeedAt(size=2, hosts=1, step_time=0.6))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def priors(address: Address, said: list[str]) -> Iterator[Priors]:
    database = Database(address)
    record = Record(KIND, speeds=SPEEDS, memory=100, ended=2.0, exit_code=0)
    database.remember(JobKey("mnist", 1.0), record)
    database.close()
    found = Priors(Database(address), said.append)
    found.start()
    yield found
    found.stop()
    assert not found._thread.is_alive()


def view(*names: str) -> View:
    jobs = tuple(JobView(name=name, arrived=0.0, least=1) for name in names)
    return View(now=0.0, triggers=(), jobs=jobs, hosts=())


def speeds(priors: Priors, *names: str) -> list[tuple[SpeedAt, ...]]:
    return [job.speeds for job in priors.into(view(*names)).jobs]


def test_a_job_gets_what_similar_jobs_have_measured(priors: Priors, said: list[str]) -> None:
    assert speeds(priors, "mnist", "new") == [(), ()], "no plan waits for the database"
    priors.ask("mnist", Kind(name="mnist", command="x"))
    priors.ask("new", Kind(name="new", command="c"))
    eventually(lambda: speeds(priors, "mnist") == [SPEEDS], within=20, what="the prior of a name")
    assert priors.into(view("mnist")).jobs[0].memory == 150
    assert speeds(priors, "new") == [()]
    priors.ask("new", Kind(name="new", command="c", parameters=7))
    eventually(lambda: speeds(priors, "new") == [SPEEDS], within=20, what="that of a model")
    priors.forget("new")
    assert speeds(priors, "mnist", "new") == [SPEEDS, ()]
    assert said == ["mnist: finished jobs like this one: 1", "new: finished jobs like this one: 1"]


def test_a_database_that_is_away_is_told_once_and_asked_again(
    in_file: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.1)
    told: list[str] = []
    database = Database(in_file)
    database.remember(JobKey("mnist", 1.0), Record(KIND, speeds=SPEEDS, ended=2.0, exit_code=0))
    database.close()
    folder = os.path.dirname(in_file.file)
    os.rename(folder, folder + ".away")
    found = Priors(database, told.append)
    found.start()
    try:
        found.ask("mnist", KIND)
        eventually(lambda: told, within=20, what="a line")
        os.rename(folder + ".away", folder)
        eventually(lambda: speeds(found, "mnist") == [SPEEDS], within=20, what="the prior")
    finally:
        found.stop()
    assert told == [
        "--stats-db cannot be read (No such file or directory); no job is compared with others",
        "mnist: finished jobs like this one: 1",
    ]


def test_a_brain_gives_a_new_job_no_more_than_helped_similar_ones(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    stats = Address(file=str(tmp_path / "stats.db"))
    times = (1, 1.0), (2, 1.02), (3, 1.52), (4, 2.02)  # no faster from two workers on
    speeds = tuple(SpeedAt(size=size, hosts=1, step_time=took) for size, took in times)
    kind = Kind(name="mine", command="c")
    database = Database(stats)
    database.remember(JobKey("mine", 1.0), Record(kind, speeds=speeds, ended=2.0, exit_code=0))
    database.close()
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# none yet\n")
    with elasticbrain(tmp_path, "--hostfile", str(hostfile), "--stats-db", stats.file) as brain:
        token = job_token(read_credentials(brain.folder / "job.token").token, "mine")
        client = RendezvousClient(brain.url, token, 5.0)
        try:
            said = msgspec.json.encode(JobReport(began=5.0, least=1, kind=kind))
            client.set(lease_key("mine"), b"", lease=30.0)
            client.post_json(EVENTS_PATH, said)
            line = "mine: finished jobs like this one: 1"
            eventually(lambda: line in brain.said(), within=20, what="the similar job")
            hostfile.write_text("a slots=4\n")

            def granted() -> dict[str, int] | None:
                entry = client.get(grant_key("mine"))
                found = None if entry is None else msgspec.json.decode(entry.value, type=Grant)
                return None if found is None else found.hosts

            assert eventually(granted, within=20, what="a grant") == {"a": 2}
        finally:
            client.close()
