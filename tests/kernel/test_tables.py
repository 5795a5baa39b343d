"""Snapshots: the state of a machine comes back, also by another version, or is refused by name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest

from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import StatesDiffer
from elastic_driver.job.job import Job
from elastic_driver.job.parts import PARTS
from elastic_driver.kernel.tables import (
    FORMAT,
    SnapshotError,
    Snapshots,
    Tables,
    columns,
    index,
    saved,
)
from elastic_driver.settings import Settings
from elastic_driver.words.findings import StateValue
from tests.job.scenario import Scenario


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


class Where(NamedTuple):
    host: str
    at: float | None = None


@dataclass(slots=True)
class Box:
    """A record that several fields have."""

    name: str
    where: Where = Where("a")  # noqa: RUF009 - it never changes
    colour: Colour = Colour.RED


@dataclass
class Store(Snapshots):
    """A machine of one part."""

    size: int = saved(0)
    _seen: set[str] = saved(factory=set, name="seen")
    _by_pair: dict[tuple[str, int], float] = saved(factory=dict, name="by_pair")
    boxes: dict[str, Box] = saved(factory=dict)
    _red: dict[str, Box] = index("boxes", name="red")
    _of: dict[Colour, dict[str, Box]] = index("boxes", name="of")
    passing: list[str] = field(default_factory=list)  # no state


def store() -> Store:
    boxes = {name: Box(name, Where("h", float("inf")), Colour.BLUE) for name in ("z", "b", "a")}
    boxes["b"].colour = Colour.RED
    blue = {"a": boxes["a"], "z": boxes["z"]}
    return Store(
        3, {"y", "x"}, {("h", 1): 0.5}, boxes, {"b": boxes["b"]}, {Colour.BLUE: blue}, ["now"]
    )


def test_the_state_comes_back_with_types_order_and_identities_and_nothing_else() -> None:
    before = store()
    after = Store.restored(before.snapshot())
    assert after.passing == []
    after.passing = before.passing
    assert after == before
    # A set has no order.
    assert repr(after).replace("{'y', 'x'}", "{'x', 'y'}") == repr(before).replace(
        "{'y', 'x'}", "{'x', 'y'}"
    )
    assert after._red["b"] is after.boxes["b"]
    assert after._of[Colour.BLUE]["z"] is after.boxes["z"]
    assert list(after._of[Colour.BLUE]) == ["a", "z"]
    assert after.snapshot() == before.snapshot()


def test_equal_states_have_equal_bytes_whatever_the_order_of_a_set() -> None:
    one, other = store(), store()
    one._seen = set(map(str, range(100)))
    other._seen = set(map(str, reversed(range(100))))
    assert one.snapshot() == other.snapshot()


def changed(snapshot: bytes, **more: object) -> bytes:
    form, name, version, tables = msgspec.msgpack.decode(snapshot)
    tables[""].update(more)
    return msgspec.msgpack.encode((form, name, version, tables))


def test_a_field_that_was_renamed_keeps_its_name_in_the_table() -> None:
    @dataclass
    class Later(Snapshots):
        amount: int = saved(0, name="size")
        _heard: set[str] = saved(factory=set, name="seen")
        new: float = saved(1.5)

    Later.__name__ = "Store"
    later = Later.restored(store().snapshot())
    assert (later.amount, later._heard, later.new) == (3, {"x", "y"}, 1.5)


def test_what_a_later_version_has_besides_is_left_out() -> None:
    before = store()
    after = Store.restored(changed(before.snapshot(), weight=7))
    assert after.snapshot() == before.snapshot()


def test_tables_of_an_older_version_are_brought_up_one_version_at_a_time() -> None:
    def litres(tables: Tables) -> None:
        tables[""]["size"] *= 1000

    def negative(tables: Tables) -> None:
        tables[""]["size"] *= -1

    class Newer(Store):
        VERSION = 3
        UPGRADES: ClassVar[Any] = {1: litres, 2: negative}

    Newer.__name__ = "Store"
    assert Newer.restored(store().snapshot()).size == -3000
    with pytest.raises(SnapshotError, match="of version 3 of the Store, only up to 1 can be read"):
        Store.restored(Newer(1).snapshot())


HUGE = b"\x94\x02\xa5Store\xcf\x80" + bytes(7) + b"\x80"
DEEP = b"\x94\x02\xa5Store\x01" + 5000 * b"\x91" + b"\xc0"


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x02", b"\x90", store().snapshot()[:-2], DEEP])
def test_damaged_bytes_are_refused_in_one_line(damage: bytes) -> None:
    with pytest.raises(SnapshotError, match="a snapshot is damaged") as refused:
        Store.restored(damage)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"size": "3"}, r"Expected `int`, got `str`"),
        ({"red": ["none"]}, "none"),
        ({"boxes": {"a": {"colour": "red"}}}, "missing required field `name`"),
        ({"boxes": {"a": {"name": "a", "colour": "green"}}}, "Invalid enum value"),
    ],
)
def test_a_table_with_another_meaning_is_refused_by_name(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(SnapshotError, match=f"a snapshot cannot be read: .*{said}.*; use the ver"):
        Store.restored(changed(store().snapshot(), **wrong))
    with pytest.raises(SnapshotError):
        Store.restored(HUGE)


@pytest.mark.parametrize("machine", [DataSets(), TfCluster(30.0), Job(Settings())])
def test_parts_that_are_no_tables_are_refused(machine: Any) -> None:
    form, name, version, tables = msgspec.msgpack.decode(machine.snapshot())
    for part in tables:
        for wrong in ([], 3, {"a": 3}):
            damaged = msgspec.msgpack.encode((form, name, version, {**tables, part: wrong}))
            with contextlib.suppress(SnapshotError):  # {"a": 3}: a table without a known name
                type(machine).restored(damaged)


def test_another_format_and_another_machine_are_refused() -> None:
    other = msgspec.msgpack.encode((FORMAT + 1, "Store", 1, {}))
    with pytest.raises(SnapshotError, match="has format 3, only 2 can be read; use the version"):
        Store.restored(other)
    with pytest.raises(SnapshotError, match="a snapshot of a 'Store', not of a Job"):
        Job.restored(store().snapshot())


def test_a_private_field_needs_a_name_in_the_table() -> None:
    @dataclass
    class Nameless(Snapshots):
        _size: int = saved(0)

    with pytest.raises(TypeError, match=r"Nameless\._size needs a name in the table"):
        Nameless().snapshot()


# ---- the job -----------------------------------------------------------------------------


def test_every_field_of_a_part_is_saved_or_is_a_part_that_it_needs() -> None:
    """A field that is neither would be lost when another driver takes over."""
    lost = [
        f"{name}.{each.name}"
        for name, part in PARTS.items()
        for each in fields(part)
        if "saved" not in each.metadata and each.name not in (*PARTS, "settings", "roles", "tf")
    ]
    assert lost == ["effects.decisions"], "the decisions upon an event are over with it"


def test_a_job_comes_back_though_a_private_field_was_renamed() -> None:
    """As a later version would: the class has another attribute, the table the same name."""
    job = Scenario(start_np=2).training(a=2).job
    found = {each.name for part in PARTS.values() for each in columns(part)}
    assert not [name for name in found if name.startswith("_")]
    tables = job.tables()
    for name in ("adoption", "membership", "spares"):
        tables[name] = {**tables[name], "of_a_later_version": 1}
    after = Job.from_tables(msgspec.msgpack.decode(msgspec.msgpack.encode(tables)))
    assert after.snapshot() == job.snapshot()


def test_a_part_that_an_older_version_had_not_begins_anew() -> None:
    job = Scenario(start_np=2).training(a=2).job
    tables = msgspec.msgpack.decode(msgspec.msgpack.encode(job.tables()))
    del tables["unanswered"]
    assert Job.from_tables(tables).snapshot() == job.snapshot()


def test_a_job_that_has_given_up_or_whose_states_differ_comes_back() -> None:
    few = Scenario(start_np=2, start_timeout=5.0)
    few.hosts(a=1)
    few.wait(10.0)
    differ = Scenario(start_np=2).training(a=2)
    differ.send(StatesDiffer(1, 5, "lr", (StateValue((0,), "1"),), "a test"))
    for scenario, status in ((few, 75), (differ, 65)):
        job = Job.restored(scenario.job.snapshot())
        assert job.ending.end is not None
        assert job.ending.end.exit_code == status


def test_the_settings_come_back() -> None:
    settings = Settings(start_np=3, tf_roles=(("worker", None),), refused_hosts=(("a", "why"),))
    assert Job.restored(Job(settings).snapshot()).settings == settings
