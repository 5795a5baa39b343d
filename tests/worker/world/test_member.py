"""The moments in which a worker enters a round, and a notice comes."""

from __future__ import annotations

import select
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from elastic_driver.words.orders import Notice, World
from elastic_driver.words.world import Member
from elastic_driver.worker import current
from elastic_driver.worker.heartbeat.watches import PreemptionWatch
from elastic_driver.worker.world import groups
from elastic_driver.worker.world.gloo import GroupConnections
from elastic_driver.worker.world.groups import BackendChoice
from elastic_driver.worker.world.member import ALONE, JobMembership


@pytest.mark.parametrize("ended", [True, False])
def test_a_notice_that_comes_after_the_build_wakes_the_heartbeat_when_the_round_is_entered(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, preemption = JobMembership(None), PreemptionWatch("a.0.1", 0.0)
    born = SimpleNamespace(endpoint="http://127.0.0.1:1")
    member._driver = SimpleNamespace(born=born, preemption=preemption)  # type: ignore[assignment]

    def install(*_: object) -> None:
        if ended:
            member._notices.on_notice(Notice(1, None, "a.0.2 was lost"))

    group = SimpleNamespace(
        elected=True, half=None, connections=GroupConnections(), install=install
    )
    monkeypatch.setattr(groups, "build", lambda *_, **__: group)
    monkeypatch.setattr(current._Current, "place", None)
    monkeypatch.setattr(current._Current, "round", 0)
    me = Member(worker="a.0.1", place=ALONE)
    member._enter(World(round=1, members=(me,), reason="test"), me, HashStore(), 0)
    assert bool(select.select([preemption], [], [], 0)[0]) == ended
    preemption.close()


@pytest.mark.parametrize("how", ["to join the next round", "at the end of the script"])
def test_taking_a_group_down_is_bounded_and_an_error_is_not_taken_for_a_hang(how: str) -> None:
    member, bounded = JobMembership(None), []

    def take_down(_ended: object) -> None:
        bounded.append(member._notices._taken_down_since is not None)
        raise RuntimeError("torch cannot destroy the group")

    group = SimpleNamespace(half=None, take_down=take_down, cut_off_device=lambda broken: None)
    member._notices.group = group  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="torch cannot"):
        member.join("a new host") if "join" in how else member.stop()
    assert bounded == [True]
    assert member._notices._taken_down_since is None


@pytest.mark.parametrize("early", [True, False])
def test_a_device_of_its_own_is_opened_before_the_driver_hears_of_the_worker(early: bool) -> None:
    order: list[str] = []
    device = SimpleNamespace(open=lambda: order.append("device"))
    member = JobMembership(None, BackendChoice(device, early=early))  # type: ignore[arg-type]
    member.start()
    assert not order, "without a driver the script comes first"
    member._driver = SimpleNamespace(start=lambda: order.append("driver"))  # type: ignore[assignment]
    member.start()
    assert order == (["device", "driver"] if early else ["driver"])


def test_the_device_is_selected_also_where_gloo_carries_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    device = SimpleNamespace(begin=lambda: order.append("selected"), identity=lambda: "gpu 1")
    member = JobMembership(None, BackendChoice(device, by_vote=True))  # type: ignore[arg-type]
    group = SimpleNamespace(
        elected=False,
        half=None,
        connections=GroupConnections(),
        install=lambda _: order.append("installed"),
    )
    monkeypatch.setattr(groups, "build", lambda *_, **__: group)
    monkeypatch.setattr(current._Current, "place", None)
    monkeypatch.setattr(current._Current, "round", 0)
    me = Member(worker="a.0.1", place=ALONE)
    member._enter(World(round=1, members=(me,), reason="test"), me, HashStore(), 0)
    assert order == ["selected", "installed"]
