"""The cluster that forms over HTTP, without HTTP: a clock that moves only when told."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.features.tensorflow import machine as tf_cluster
from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.features.tensorflow.messages import (
    BarrierRequest,
    ClusterSpec,
    ClusterSpecRequest,
    LookRequest,
    Synchronized,
    SynchronizeRequest,
    TfRequest,
    WaitingNodes,
)
from elastic_driver.job.events import DriverResumed, Tick
from elastic_driver.kernel.services import Rejection, RequestDropped
from elastic_driver.words.tf_config import tf_config

LEASE = 10.0


class Nodes:
    """Nodes "a", "b", … whose requests are known by their last ticket; answers by node."""

    def __init__(self, least: int = 2, most: int = 3, gather: float = 2.0) -> None:
        self.cluster = TfCluster(LEASE)
        self.bounds = (least, most, gather)
        self.now = 100.0
        self.got: dict[str, Any] = {}
        self.tickets = 0
        self.nodes: dict[int, str] = {}  # by ticket

    def join(self, *names: str, wait: float = 60.0, request: str = "") -> None:
        least, most, gather = self.bounds
        for name in names:
            bounds = least, most, wait, gather
            self._ask(name, ClusterSpecRequest(f"{name}:1", *bounds, request=request))

    def synchronize(self, name: str, tag: str = "t", timeout: float = 5.0, **more: Any) -> None:
        value = name.encode()
        self._ask(name, SynchronizeRequest(f"{name}:1", tag, timeout, value=value, **more))

    def barrier(self, name: str, tag: str = "t", timeout: float = 5.0) -> None:
        self._ask(name, BarrierRequest(f"{name}:1", tag, timeout))

    def look(self, name: str) -> int:
        before = self.got.pop(name, None)
        self._ask(name, LookRequest(f"{name}:1"))
        found = self.got.pop(name)
        if before is not None:
            self.got[name] = before
        assert isinstance(found, WaitingNodes)
        return found.count

    def wait(self, seconds: float, alive: str = "") -> None:
        """Let time pass; the nodes in `alive` ask for news all the while."""
        end = self.now + seconds
        while self.now < end:
            due = self.cluster.deadline()
            steps = [end, self.now + 1.0, *([max(due, self.now)] if due is not None else [])]
            self.now = min(steps)
            for name in alive:
                self.look(name)
            self.handle(Tick())
            after = self.cluster.deadline()
            assert after is None or after > self.now

    def take(self) -> dict[str, Any]:
        """What was answered since the last time, by node."""
        got, self.got = self.got, {}
        return got

    def specs(self) -> dict[str, tuple[int, str]]:
        """(generation, all nodes by index) as the last answers say, by node."""
        found = {}
        for name, spec in self.take().items():
            assert isinstance(spec, ClusterSpec), spec
            members = [address[0] for address in spec.cluster["worker"]]
            assert members[spec.task.index] == name
            found[name] = (spec.generation, "".join(members))
        return found

    def up(self, *names: str) -> Nodes:
        """A cluster of these nodes."""
        self.join(*names)
        if len(names) < self.bounds[1]:
            self.wait(self.bounds[2])
        assert set(self.specs()) == set(names)
        return self

    def resume(self) -> None:
        """Let another driver go on: all tickets are those of connections that have ended."""
        self.nodes.clear()
        self.handle(DriverResumed(2, "the driver has died"))

    def handle(self, event: TfRequest | RequestDropped | DriverResumed | Tick) -> None:
        """Hand an event to the cluster, and keep the replies."""
        for reply in self.cluster.handle(event, self.now):
            self.got[self.nodes[reply.ticket]] = reply.document
        assert self.cluster.check() == []

    def _ask(self, name: str, request: Any, owner: str = "") -> None:
        self.tickets += 1
        self.nodes[self.tickets] = name
        self.handle(TfRequest(self.tickets, request, owner))


# ---- bringup -----------------------------------------------------------------------------


def test_nobody_is_answered_before_the_minimum_has_come() -> None:
    nodes = Nodes()
    nodes.join("a")
    nodes.wait(50.0)
    assert nodes.take() == {}


def test_the_window_opens_with_the_minimum_and_no_arrival_prolongs_it() -> None:
    nodes = Nodes(least=2, most=9, gather=2.0)
    nodes.join("a", "b")
    nodes.wait(1.5)
    nodes.join("c")
    nodes.wait(0.49)
    assert nodes.take() == {}
    nodes.wait(0.01)
    assert nodes.specs() == {"a": (1, "abc"), "b": (1, "abc"), "c": (1, "abc")}


def test_the_maximum_closes_the_window_at_once_and_is_never_exceeded() -> None:
    nodes = Nodes(least=2, most=3)
    nodes.join("a", "b", "c", "d")
    assert nodes.specs() == {"a": (1, "abc"), "b": (1, "abc"), "c": (1, "abc")}
    nodes.wait(5.0, alive="abc")
    assert nodes.take() == {}
    assert nodes.look("a") == 0, "there is no room for d: nobody should start anew for it"


def test_single_connect() -> None:
    nodes = Nodes(least=1, most=1)
    nodes.join("a")
    assert nodes.specs() == {"a": (1, "a")}


def test_a_spec_is_the_two_halves_of_tf_config() -> None:
    nodes = Nodes(least=2, most=2)
    nodes.join("a", "b")
    spec = nodes.take()["b"]
    assert tf_config(spec.cluster, spec.task) == (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    )


def test_who_waits_too_long_is_told_why_and_keeps_its_place_for_a_lease() -> None:
    nodes = Nodes(least=2, most=2)
    nodes.join("a", wait=5.0)
    nodes.wait(5.0)
    refused = nodes.take()["a"]
    assert (refused.code, refused.message) == (
        "timed_out",
        "no cluster yet: 1 node waits, 2 needed",
    )
    nodes.join("b")
    assert nodes.specs() == {"b": (1, "ab")}
    nodes.join("a")
    assert nodes.specs() == {"a": (1, "ab")}, "it formed while a was between two requests"


def test_who_does_not_ask_again_loses_its_place() -> None:
    nodes = Nodes(least=2, most=2)
    nodes.join("a", wait=5.0)
    nodes.wait(5.0 + LEASE)
    nodes.join("b")
    assert isinstance(nodes.take()["a"], Rejection)


def test_a_client_that_went_away_while_it_waited_is_forgotten_after_a_lease() -> None:
    nodes = Nodes(least=2, most=2)
    nodes.join("a")
    nodes.handle(RequestDropped("tf", nodes.tickets))
    nodes.wait(LEASE)
    nodes.join("b")
    assert nodes.take() == {}


def test_nodes_that_wait_together_have_to_agree_on_the_size() -> None:
    nodes = Nodes(least=2, most=3)
    nodes.join("a")
    nodes.bounds = (2, 4, 2.0)
    nodes.join("b")
    assert nodes.take()["b"].code == "other_bounds"
    nodes.join("a")  # alone it may change its mind
    assert nodes.take()["a"].code == "replaced"
    nodes.bounds = (3, 2, 2.0)
    nodes.join("c")
    assert nodes.take()["c"].code == "bad_bounds"


# ---- waiting, growth, shrink, reset ------------------------------------------------------


def test_newcomers_wait_until_every_member_has_asked_for_the_next_generation() -> None:
    nodes = Nodes(least=2, most=3).up("a", "b")
    nodes.join("c")
    assert nodes.look("a") == 1
    nodes.join("a")
    assert nodes.look("b") == 2, "a waits, too"
    nodes.wait(5.0, alive="b")
    assert nodes.take() == {}
    nodes.join("b")
    assert nodes.specs() == {"a": (2, "abc"), "b": (2, "abc"), "c": (2, "abc")}


def test_a_lost_member_counts_below_zero_and_the_others_go_on_without_it() -> None:
    nodes = Nodes(least=2, most=3).up("a", "b", "c")
    nodes.wait(LEASE - 1, alive="ac")
    assert nodes.look("a") == 0
    nodes.wait(1.0, alive="ac")
    assert nodes.look("a") == -1
    nodes.join("d")
    assert nodes.look("c") == -1, "a loss matters more than who waits"
    nodes.join("a", "c")
    assert nodes.specs() == {"a": (2, "adc"), "c": (2, "adc"), "d": (2, "adc")}


def test_worker_0_is_the_oldest_that_is_left() -> None:
    nodes = Nodes(least=2, most=3).up("a", "b", "c")
    nodes.wait(LEASE, alive="bc")
    nodes.join("c", "b")
    nodes.wait(2.0)
    assert nodes.specs() == {"b": (2, "bc"), "c": (2, "bc")}


def test_survivors_come_before_those_who_waited_longer() -> None:
    nodes = Nodes(least=1, most=2).up("a", "b")
    nodes.join("x", "y")
    nodes.join("b", "a")
    assert nodes.specs() == {"a": (2, "ab"), "b": (2, "ab")}


def test_reset_all_members_ask_again_and_keep_their_indices() -> None:
    nodes = Nodes(least=2, most=3).up("a", "b", "c")
    nodes.join("c", "b", "a")
    assert nodes.specs() == {"a": (2, "abc"), "b": (2, "abc"), "c": (2, "abc")}


def test_reset_when_all_are_lost_the_next_ones_begin_by_themselves() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    nodes.wait(LEASE)
    nodes.join("x", "y")
    assert nodes.specs() == {"x": (2, "xy"), "y": (2, "xy")}
    assert nodes.look("x") == 0


def test_a_driver_that_stood_still_blames_nobody() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    nodes.now += LEASE + 29.0
    nodes.handle(Tick())
    assert nodes.look("a") == 0
    assert nodes.look("b") == 0
    nodes.wait(LEASE)
    assert nodes.look("a") == -2


# ---- barrier and synchronize -------------------------------------------------------------


def test_synchronize_gives_all_values_to_all_in_the_order_of_their_indices() -> None:
    nodes = Nodes(least=3).up("a", "b", "c")
    nodes.synchronize("c")
    nodes.synchronize("a")
    assert nodes.take() == {}
    nodes.synchronize("b")
    values = {"a:1": b"a", "b:1": b"b", "c:1": b"c"}
    assert nodes.take() == dict.fromkeys("abc", Synchronized(1, values))
    assert list(values) == ["a:1", "b:1", "c:1"]


def test_tags_are_apart_and_may_be_used_again() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    nodes.synchronize("a", tag="x")
    nodes.synchronize("b", tag="y")
    assert nodes.take() == {}
    nodes.synchronize("b", tag="x")
    assert set(nodes.take()) == {"a", "b"}
    nodes.synchronize("b", tag="x")
    assert nodes.take() == {}
    nodes.synchronize("a", tag="x")
    assert set(nodes.take()) == {"a", "b"}


def test_a_time_out_is_told_to_all_and_names_who_is_missing_and_later_to_the_late_one() -> None:
    nodes = Nodes(least=3).up("a", "b", "c")
    nodes.barrier("a", timeout=5.0)
    nodes.barrier("b", timeout=9.0)
    nodes.wait(5.0, alive="abc")
    told = nodes.take()
    assert {reply.code for reply in told.values()} == {"timed_out"}
    timed_out = "'barrier t' timed out: c:1 (1 of 3) did not come"
    assert told["a"].message == told["b"].message == timed_out
    nodes.barrier("c")
    assert nodes.take()["c"].message == told["a"].message, "not a meeting of its own"
    for name in "abc":
        nodes.barrier(name)
    assert set(nodes.take()) == set("abc"), "the tag can be used again"


def test_a_members_own_failure_is_told_to_all() -> None:
    nodes = Nodes(least=3).up("a", "b", "c")
    nodes.synchronize("a")
    nodes.synchronize("b", failure="out of memory")
    assert {name: r.message for name, r in nodes.take().items()} == dict.fromkeys(
        "ab", "'synchronize t' failed: b:1 says: out of memory"
    )
    nodes.synchronize("c")
    assert nodes.take()["c"].code == "failed"


def test_a_member_that_is_lost_or_leaves_ends_every_wait_for_it() -> None:
    lost = Nodes(least=2, most=2).up("a", "b")
    lost.barrier("a", timeout=300.0)
    lost.wait(LEASE, alive="a")
    assert lost.take()["a"].message.startswith("b:1 was not heard of for 10 s")
    left = Nodes(least=2, most=2).up("a", "b")
    left.barrier("a")
    left.join("b")
    assert "b:1 has asked for the next cluster" in left.take()["a"].message
    left.barrier("a")
    assert left.take()["a"].code == "member_gone"


def test_who_is_no_member_meets_nobody() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    nodes.barrier("x")
    assert nodes.take()["x"].code == "not_a_member"


def test_meetings_leave_nothing_behind() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    for step in range(100):
        nodes.synchronize("a", tag=f"step {step}")
        nodes.synchronize("b", tag=f"step {step}")
    meetings = nodes.cluster._meetings
    assert (meetings._tags, meetings._held.total(), meetings._calls.total()) == ({}, 0, 0)


# ---- answers that are lost, and drivers that die ----------------------------------------------


def test_a_node_whose_answer_was_lost_gets_its_cluster_again() -> None:
    nodes = Nodes(least=2, most=2)
    nodes.join("a", "b", request="first")
    formed = nodes.take()
    nodes.resume()
    nodes.join("a", request="first")
    assert nodes.take() == {"a": formed["a"]}
    assert nodes.look("b") == 0, "the cluster goes on"
    nodes.join("a", request="second")
    assert nodes.take() == {}, "now it wants the next cluster"


def test_nodes_that_wait_ask_the_next_driver_and_count_once() -> None:
    nodes = Nodes(least=3, most=3)
    nodes.join("a", "b")
    nodes.resume()
    nodes.join("a")
    assert nodes.cluster.view().waiting == ("a:1", "b:1")
    nodes.join("c")
    assert nodes.specs() == {"a": (1, "abc"), "c": (1, "abc")}
    nodes.join("b")
    assert nodes.specs() == {"b": (1, "abc")}


def test_a_member_has_one_lease_to_find_the_next_driver() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    nodes.now += LEASE - 1.0
    nodes.resume()
    nodes.wait(LEASE - 0.1)
    assert nodes.look("a") == nodes.look("b") == 0


def test_a_barrier_during_which_the_driver_dies_is_passed_with_the_next_one() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    for named in ({"request": "again"}, {}):
        nodes.synchronize("a", **named)
        nodes.resume()
        nodes.synchronize("a", **named)
        assert nodes.take() == {}
        nodes.synchronize("b")
        got = nodes.take()
        assert got["a"] == got["b"] == Synchronized(1, {"a:1": b"a", "b:1": b"b"})
    met = nodes.cluster._meetings
    assert (met._tags, met._held.total(), met._calls.total()) == ({}, 0, 0)


def test_a_member_whose_answer_at_a_barrier_was_lost_gets_it_again() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    nodes.synchronize("a", request="one")
    nodes.synchronize("b", request="other")
    met = nodes.take()
    nodes.resume()
    nodes.synchronize("a", request="one")
    assert nodes.take() == {"a": met["a"]}
    nodes.synchronize("a", request="two")
    assert nodes.take() == {}, "this is the next meeting"


def test_names_of_requests_leave_nothing_behind() -> None:
    nodes = Nodes(least=2, most=2).up("a", "b")
    for step in range(100):
        nodes.synchronize("a", request=f"a {step}")
        nodes.synchronize("b", request=f"b {step}")
    assert len(nodes.cluster._given) == 2
    nodes.look("a")
    nodes.join("b", wait=1.0, request="next")
    nodes.wait(2.0, alive="a")
    assert (nodes.cluster._given, nodes.cluster._names) == ({}, {})


# ---- one worker among others ---------------------------------------------------------------


def refusal(nodes: Nodes, name: str) -> str:
    answer = nodes.take().get(name)
    return answer.code if isinstance(answer, Rejection) else ""


def test_a_worker_speaks_for_no_node_of_another() -> None:
    nodes = Nodes(least=2, most=2)
    for name, owner in (("a", "h.0"), ("b", "h.1")):
        nodes._ask(name, ClusterSpecRequest(f"{name}:1", 2, 2, 60.0, 2.0), owner)
    assert nodes.specs().keys() == {"a", "b"}
    for request in (
        BarrierRequest("a:1", "t", 5.0, failure="says another"),
        ClusterSpecRequest("a:1", 2, 2, 60.0, 2.0),
        LookRequest("a:1"),
    ):
        nodes._ask("a", request, "h.1")
        assert refusal(nodes, "a") == "not_yours"
    nodes.resume()
    nodes._ask("a", LookRequest("a:1"), "h.1")
    assert refusal(nodes, "a") == "not_yours", "the next driver knows, too"
    for name, owner in (("a", "h.0"), ("b", "h.1")):
        nodes._ask(name, BarrierRequest(f"{name}:1", "t", 5.0), owner)
    assert all(isinstance(each, Synchronized) for each in nodes.take().values())
    nodes._ask("a", LookRequest("a:1"), "")
    assert refusal(nodes, "a") == "", "an orchestrator has an operator's token"
    nodes.wait(2 * LEASE)
    nodes._ask("a", ClusterSpecRequest("a:1", 2, 2, 60.0, 2.0), "h.1")
    assert refusal(nodes, "a") == "", "it was free"


def test_one_worker_takes_no_places_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_cluster, "MAX_NODES", 16)
    nodes = Nodes()
    for name in "abcdef":
        nodes._ask(name, ClusterSpecRequest(f"{name}:1", 20, 20, 60.0, 2.0), "h.0")
        assert refusal(nodes, name) == ("too_many" if name in "ef" else "")
    nodes._ask("f", LookRequest("f:1"), "h.0")
    assert refusal(nodes, "f") == "", "who only looks has no place"
    nodes._ask("g", ClusterSpecRequest("g:1", 20, 20, 60.0, 2.0), "h.1")
    assert refusal(nodes, "g") == ""
    assert len(nodes.cluster._owners) == 5
    nodes.wait(200.0)
    assert nodes.cluster._owners == {}


def test_one_member_calls_no_end_of_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tag again and again was no further tag, and no meeting was forgotten."""
    monkeypatch.setattr(tf_cluster, "MAX_TAGS", 16)
    monkeypatch.setattr(tf_cluster, "MAX_HELD_BYTES", 16)
    monkeypatch.setattr(tf, "MAX_VALUE_BYTES", 1)
    nodes = Nodes(least=2, most=2).up("a", "b")
    for tag in ("t", "t", "u", "v", "t"):
        nodes.barrier("a", tag)
        assert refusal(nodes, "a") == ("", "too_many_tags")[nodes.tickets == 7]
    for tag in ("t", "t", "u", "v"):
        nodes.barrier("b", tag)
    assert nodes.take().keys() == {"a", "b"}
    for name, code in (("a" * 3, ""), ("a" * 2, "too_large")):
        request = SynchronizeRequest("a:1", "t", 5.0, value=name.encode())
        nodes._ask("a", request)
        assert refusal(nodes, "a") == code
    nodes._ask("b", SynchronizeRequest("b:1", "t", 5.0, value=b"bbbb"))
    assert isinstance(nodes.take()["b"], Synchronized)
