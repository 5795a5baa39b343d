"""Whole jobs and nodes in SQLite and PostgreSQL: remembered, found again, and upgraded."""

from __future__ import annotations

import pytest

pytest.importorskip("sqlalchemy")

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import (
    DAY,
    FINE,
    FRESH_S,
    JobKey,
    Node,
    Record,
    Row,
    Series,
    Summary,
)
from elastic_driver.brain.store.statements import STEPS

NAMED = Kind(name="mnist", command="a" * 64)
KNOWN = Kind(name="mnist", command="a" * 64, parameters=10**12, batch=256)
SPEEDS = (
    SpeedAt(size=1, hosts=1, step_time=1.0),
    SpeedAt(size=2, hosts=1, step_time=0.55, error=0.01),
    SpeedAt(size=4, hosts=2, step_time=0.53),
)
DONE = Record(KNOWN, 1, 8, 8, 2**40, SPEEDS, ended=20.5, exit_code=0)


def key(number: int, run: str = "mnist") -> JobKey:
    return JobKey(run, float(number))


def test_a_record_comes_back_as_it_was_written(address: Address) -> None:
    database = Database(address)
    database.remember(key(1), DONE)
    database.remember(key(2), Record(NAMED))
    assert database.records() == [(key(1), DONE), (key(2), Record(NAMED))]
    database.close()
    assert database.similar(NAMED, 5) == [DONE], "the other one has not ended"
    database.close()


def test_what_an_earlier_driver_knew_stays_known(address: Address) -> None:
    database = Database(address)
    database.remember(key(1), DONE._replace(ended=None, exit_code=None))
    newer = SpeedAt(size=2, hosts=1, step_time=0.6)
    later = Record(NAMED, 1, 8, memory=5, speeds=(newer,), ended=30.0, exit_code=1)
    database.remember(key(1), later)
    ((_, found),) = database.records()
    assert found == DONE._replace(speeds=(SPEEDS[0], newer, SPEEDS[2]), ended=30.0, exit_code=1)
    database.close()


def test_similar_jobs_are_the_newest_of_the_name_or_of_command_parameters_and_batch(
    address: Address,
) -> None:
    database = Database(address)
    others = [
        Kind(name="a", command=KNOWN.command, parameters=KNOWN.parameters, batch=KNOWN.batch),
        Kind(name="b", command=KNOWN.command, parameters=KNOWN.parameters),
        Kind(name="c", command=KNOWN.command, parameters=7, batch=KNOWN.batch),
        Kind(name="d", command="b" * 64, parameters=KNOWN.parameters, batch=KNOWN.batch),
        Kind(name="e", command=KNOWN.command),
    ]
    for number, kind in enumerate([NAMED, *others], start=1):
        database.remember(key(number, kind.name), DONE._replace(kind=kind, ended=100.0 - number))
    database.remember(key(50), Record(NAMED, ended=200.0, exit_code=1))  # it was never measured

    def names(kind: Kind, most: int = 5) -> list[str]:
        return [record.kind.name for record in database.similar(kind, most)]

    assert names(KNOWN) == ["mnist", "a"]
    assert names(NAMED) == ["mnist"], "an unknown model is like no other"
    unknown_batch = Kind(name="new", command=KNOWN.command, parameters=KNOWN.parameters)
    assert names(unknown_batch) == ["b"], "batches that both are not known are alike"
    for number in range(10, 20):
        database.remember(key(number), DONE._replace(ended=1000.0 + number))
    assert [record.ended for record in database.similar(KNOWN, 5)] == [1019, 1018, 1017, 1016, 1015]
    database.close()


def test_the_best_size_is_the_smallest_near_the_fastest() -> None:
    fixed = DONE._replace(micro_batches=8)
    assert fixed.best == 2, "a fixed batch: 1, 1.82 and 1.89 steps per second"
    own = DONE._replace(micro_batches=None)
    assert own.best == 4, "batches of their own: 1, 3.6 and 7.5 per second"
    assert Record(NAMED).best is None


def test_nodes_whose_figures_are_old_are_not_returned(address: Address) -> None:
    database = Database(address)
    old = Node("n2", 1000.0 - FRESH_S - 1, 4, 4)
    new = Node("n1", 1000.0, 4, 2, 0.5, 2**40, 2**41)
    database.put_nodes([old, new, Node("n3", 2000.0)])
    assert database.nodes(1000.0) == [new], "one is too old, and the clock of one is wrong"
    database.put_nodes([new._replace(seen=1010.0, idle=None)])
    assert database.nodes(1000.0) == [new._replace(seen=1010.0, idle=None)], "it was replaced"
    database.put_nodes([Node("n4", 2000.0 + DAY)])
    assert [node.name for node in database.nodes(2000.0 + DAY)] == ["n4"]
    assert database.nodes(1000.0) == [], "what was not seen for a day is forgotten"
    database.close()


def test_schema_1_with_data_is_upgraded(address: Address) -> None:
    row = Row(Series("job", "steps_per_s"), 10, Summary(1, 2.0, 2.0, 2.0))
    old = Database(address, STEPS[:1])
    old.write(key(1), [row])
    with pytest.raises(Exception, match=r"records"):
        old.remember(key(1), DONE)
    old.close()
    renewed = Database(address)
    assert renewed.rows(key(1), FINE) == [row]
    assert renewed.records() == []
    renewed.remember(key(1), DONE)
    assert renewed.records() == [(key(1), DONE)], "the job is the one that was there"
    renewed.close()
