"""Snapshots: whatever a machine holds comes back, or the attempt says why not."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

import msgspec
import pytest

from elastic_driver.core import snapshots
from elastic_driver.core.driver_events import StatesDiffer
from elastic_driver.core.events import StateValue
from elastic_driver.core.job import Job
from elastic_driver.core.rules.hosts import Drain, Host
from elastic_driver.core.rules.workers import WorkerState
from elastic_driver.core.snapshots import SnapshotError, pack, unpack
from elastic_driver.policies.shard_messages import Shard
from elastic_driver.policies.tf_cluster import TfCluster
from elastic_driver.settings import Settings
from tests.core.scenario import Scenario


@pytest.mark.parametrize(
    "value",
    [
        [1, -1.5, float("inf"), "a", b"\0", True, None, (), ((1,), [2])],
        {"b": 1, "a": {3, 1, 2}, ("h", 0): [], Shard(0, "", 0, 9): 2**63},
        deque([1, 2], maxlen=3),
        Counter({("a", 1): 2}),
        OrderedDict([("b", None), ("a", None)]),
        Host("a", 2, failures=[1.0], drain=Drain("it goes", 3.0)),
        Settings(start_np=3, tf_roles=(("worker", None),)),
        WorkerState.READY,
    ],
)
def test_a_value_comes_back_with_its_type_and_order(value: object) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert pack(found) == pack(value)


def test_an_object_in_two_places_is_still_one_object() -> None:
    host = Host("a", 1)
    first, second, table = unpack(pack([host, host, {"a": host}]))  # type: ignore[misc]
    assert first is second is table["a"]


def test_an_object_that_refers_to_itself_comes_back() -> None:
    endless: list[object] = []
    endless.append(endless)
    found = unpack(pack(endless))
    assert isinstance(found, list)
    assert found[0] is found


def test_the_number_of_places_in_a_deque_comes_back() -> None:
    assert unpack(pack(deque([1], maxlen=3))).maxlen == 3  # type: ignore[attr-defined]


@dataclass
class Foreign:
    """A class outside of the pure packages."""


@pytest.mark.parametrize("value", [Foreign(), lambda: None, object(), range(3)])
def test_a_value_that_cannot_come_back_is_refused_when_it_is_written(value: object) -> None:
    with pytest.raises((SnapshotError, TypeError)):
        pack([value])


def test_another_format_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FORMAT", 2)
    later = Job(Settings()).snapshot()
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="has format 2, only 1 can be read; use the version"):
        Job.restored(later)


def test_a_class_with_other_fields_is_refused() -> None:
    snapshot = pack(Host("a", 1))
    form, classes, root = msgspec.msgpack.decode(snapshot)
    name, names = classes[0]
    other = msgspec.msgpack.encode((form, [(name, [*names, "colour"])], root))
    with pytest.raises(SnapshotError, match=r"another .*hosts:Host than"):
        unpack(other)


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "subprocess:Popen", "elastic_driver.core.job:ev"),
        *("elastic_driver.settings_of_others:Settings", "elastic_driver.core.none:Job", ""),
        "elastic_driver.core.snapshots:chain",  # a module has it, and does not define it
        "elastic_driver.core.snapshots:Counter",
        *("elastic_driver.core.snapshots:SnapshotError", "elastic_driver.core.machine:Machine"),
        *("elastic_driver.core.snapshots:_Packer", "elastic_driver.core.job:Job.__class__"),
    ],
)
def test_only_classes_of_machines_come_back(name: str) -> None:
    with pytest.raises(SnapshotError, match=r"which no machine has|than this version has"):
        unpack(msgspec.msgpack.encode((1, [(name, None)], [0])))


HUGE = b"\x93\x01\x90\x92\xff\xcf\x80" + bytes(7)  # a deque of 2**63 at most
DEEP = b"\x93\x01\x90" + 2000 * b"\x92\xfc" + b"\xc0"  # a tuple in a tuple in a tuple …


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x01", pack([1, (2, 3)])[:-2], HUGE, DEEP])
def test_damaged_bytes_are_refused_in_one_line(damage: bytes) -> None:
    with pytest.raises(SnapshotError, match="a snapshot is damaged"):
        unpack(damage)


def test_a_snapshot_of_another_machine_is_refused() -> None:
    with pytest.raises(SnapshotError, match="a snapshot of a TfCluster"):
        Job.restored(TfCluster(1.0).snapshot())


def test_a_job_that_has_given_up_or_whose_states_differ_comes_back() -> None:
    few = Scenario(start_np=2, start_timeout=5.0)
    few.hosts(a=1)
    few.wait(10.0)
    differ = Scenario(start_np=2).training(a=2)
    differ.send(StatesDiffer(1, 5, "lr", (StateValue((0,), "1"),), "a test"))
    for scenario, status in ((few, 75), (differ, 65)):
        job = Job.restored(scenario.job.snapshot())
        assert job.outcome.end is not None
        assert job.outcome.end.exit_code == status
