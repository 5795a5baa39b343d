"""Hosts in stable order, their cool-downs and their return."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.job.hosts import Hindrance, Hosts, reason_of
from elastic_driver.settings import Settings


def manager(*hosts: tuple[str, int], **settings: Any) -> Hosts:
    made = Hosts(Settings(**settings))
    made.record_discovered(hosts)
    return made


def names(hosts: Hosts) -> list[str]:
    return list(hosts.known)


def test_known_hosts_keep_their_place_and_new_ones_are_appended() -> None:
    hosts = manager(("c", 1), ("a", 1))
    changes = hosts.record_discovered((("a", 1), ("b", 2), ("c", 1)))
    assert names(hosts) == ["c", "a", "b"]
    assert (changes.added, changes.removed, changes.resized) == ((("b", 2),), (), ())


def test_the_same_hosts_in_another_order_are_no_change() -> None:
    assert not any(manager(("a", 1), ("b", 2)).record_discovered((("b", 2), ("a", 1))))


def test_removal_and_resizing_are_named() -> None:
    hosts = manager(("a", 1), ("b", 2), ("c", 3))
    changes = hosts.record_discovered((("b", 4), ("c", 0)))
    assert (changes.added, changes.removed, changes.resized) == ((), ("a", "c"), (("b", 2, 4),))
    assert "c" not in hosts.known
    assert len(hosts.known) == 1


def test_a_host_that_comes_back_goes_to_the_end() -> None:
    hosts = manager(("a", 1), ("b", 1))
    hosts.record_discovered((("b", 1),))
    hosts.record_discovered((("a", 1), ("b", 1)))
    assert names(hosts) == ["b", "a"]


def test_a_host_comes_back_after_its_cooldown_and_not_before() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    assert hosts.count_failure("a", 0.0, "w exited 1") is not None
    assert hosts.next_resurrection() == 10.0
    assert hosts.resurrect(9.9) == []
    assert not hosts.is_usable("a")
    assert hosts.cooldown_left("a", 4.0) == 6.0
    assert "w exited 1" in reason_of(hosts, "a", 4.0)
    assert hosts.resurrect(10.0) == ["a"]
    assert hosts.is_usable("a")
    assert (hosts.cooldown_left("a", 10.0), reason_of(hosts, "a", 10.0)) == (0.0, "")


@pytest.mark.parametrize(("given", "needed"), [(None, 3), (1, 1), (5, 5)])
def test_so_many_failures_within_the_window_cool_a_host_down(
    given: int | None, needed: int
) -> None:
    hosts = manager(("a", 1), host_failures=given)
    for failure in range(needed - 1):
        assert hosts.count_failure("a", float(failure), "x") is None
    assert hosts.count_failure("a", float(needed), "x") is not None


def test_failures_far_apart_do_not_add_up() -> None:
    hosts = manager(("a", 1), host_failures=2, host_failure_window=60.0)
    assert hosts.count_failure("a", 0.0, "x") is None
    assert hosts.count_failure("a", 60.0, "x") is None
    assert hosts.count_failure("a", 119.9, "x") is not None


def test_each_cooldown_is_twice_as_long_up_to_the_longest() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 35.0))
    now, lengths = 0.0, []
    for _ in range(4):
        hosts.count_failure("a", now, "x")
        lengths.append(hosts.cooldown_left("a", now))
        now += lengths[-1]
        hosts.resurrect(now)
    assert lengths == [10.0, 20.0, 35.0, 35.0]


def test_a_finished_step_and_a_quiet_window_wipe_the_doubling() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    hosts.count_failure("a", 0.0, "x")
    hosts.resurrect(10.0)
    hosts.record_step("a")
    hosts.count_failure("a", 1000.0, "x")
    assert hosts.cooldown_left("a", 1000.0) == 10.0


def test_quiet_without_a_finished_step_wipes_nothing() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    hosts.count_failure("a", 0.0, "x")
    hosts.resurrect(10.0)
    hosts.count_failure("a", 1000.0, "x")
    assert hosts.cooldown_left("a", 1000.0) == 20.0


def test_flapping_heals_nothing() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    hosts.count_failure("a", 0.0, "x")
    hosts.record_discovered(())
    hosts.record_discovered((("a", 1),))
    assert not hosts.is_usable("a")
    assert hosts.hindrance("a") is Hindrance.COOL_DOWN


def test_an_agent_lost_once_is_started_again_twice_cools_the_host_down() -> None:
    hosts = manager(("a", 1))
    assert hosts.count_agent_loss("a", 0.0, "gone", started=True) is None
    assert hosts.is_suspect("a", 30.0)
    assert hosts.count_agent_loss("a", 30.0, "gone", started=True) is not None


def test_agents_lost_far_apart_are_started_again_each_time() -> None:
    hosts = manager(("a", 1), host_failure_window=60.0)
    assert hosts.count_agent_loss("a", 0.0, "gone", started=True) is None
    assert not hosts.is_suspect("a", 60.0)
    assert hosts.count_agent_loss("a", 60.0, "gone", started=True) is None


def test_an_agent_that_cannot_start_cools_the_host_down_at_once() -> None:
    hosts = manager(("a", 1))
    reason = hosts.count_agent_loss("a", 0.0, "ssh: no route", started=False)
    assert reason == "no new workers for 10 s: ssh: no route"


def test_trouble_of_a_host_that_is_gone_is_nobodys() -> None:
    hosts = manager(("a", 1), host_failures=1)
    assert hosts.count_failure("z", 0.0, "x") is None
    assert hosts.count_agent_loss("z", 0.0, "x", started=True) is None
    hosts.record_step("z")
    assert not hosts.is_suspect("z", 0.0)
