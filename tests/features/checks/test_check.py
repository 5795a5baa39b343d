"""Verdicts by value: small clusters played by hand, each fault known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from elastic_driver.features.checks.evidence import (
    FAILED_S,
    Group,
    Measurement,
    NodeCheck,
    NodeVerdict,
    Verdict,
    failed,
)

FIRST_TO_LAST = "123456"


class Cluster:
    """Nodes with known faults and speeds: a group fails if one in it is faulty, and so on."""

    def __init__(
        self,
        *,
        faulty: str = "",
        compute: Mapping[str, float] | None = None,
        network: Mapping[str, float] | None = None,
        broken_link: str = "",
    ) -> None:
        self.faulty = set(faulty)
        self.compute, self.network = dict(compute or {}), dict(network or {})
        self.broken_link = set(broken_link)
        self.played: list[tuple[Group, ...]] = []

    def run(self, group: Group) -> list[Measurement]:
        broken = len(self.broken_link) == 2 and self.broken_link <= set(group)
        if broken or self.faulty & set(group):
            return [failed(node, "connection closed") for node in group]
        return [Measurement(n, self.compute.get(n, 1.0), self._network(n, group)) for n in group]

    def _network(self, node: str, group: Group) -> float:
        own = self.network.get(node, 1.0)
        return min((max(own, self.network.get(p, 1.0)) for p in group if p != node), default=0.0)

    def check(self, check: NodeCheck) -> dict[str, NodeVerdict]:
        while groups := check.plan():
            self.played.append(groups)
            check.report(m for group in groups for m in self.run(group))
        assert len(check.rounds) <= check.round_limit
        return {v.node: v for v in check.verdicts()}


def of(verdicts: Mapping[str, NodeVerdict], verdict: Verdict) -> str:
    return "".join(sorted(v.node for v in verdicts.values() if v.verdict is verdict))


def checked(nodes: str, **cluster: object) -> tuple[Cluster, dict[str, NodeVerdict]]:
    played = Cluster(**cluster)  # type: ignore[arg-type]
    return played, played.check(NodeCheck(tuple(nodes)))


# ---- rounds ------------------------------------------------------------------------------


def test_a_healthy_cluster_is_done_after_one_round_of_neighbours() -> None:
    cluster, verdicts = checked(FIRST_TO_LAST)
    assert cluster.played == [(("1", "2"), ("3", "4"), ("5", "6"))]
    assert of(verdicts, Verdict.GOOD) == FIRST_TO_LAST


def test_an_odd_node_joins_the_last_pair() -> None:
    assert NodeCheck(tuple("12345")).plan() == (("1", "2"), ("3", "4", "5"))


def test_of_a_failed_pair_each_is_tried_with_a_good_node_and_only_the_faulty_one_is_named() -> None:
    cluster, verdicts = checked(FIRST_TO_LAST, faulty="6")
    assert len(cluster.played) == 2
    for suspect, partner in cluster.played[1]:
        assert suspect in "56"
        assert partner in "1234"
    assert of(verdicts, Verdict.FAULTY) == "6"
    assert of(verdicts, Verdict.GOOD) == "12345"
    assert "proved good: connection closed" in verdicts["6"].reason


def test_two_faults_in_different_pairs_blame_no_healthy_node() -> None:
    _, verdicts = checked("12345678", faulty="25")
    assert of(verdicts, Verdict.FAULTY) == "25"
    assert of(verdicts, Verdict.GOOD) == "134678"


def test_only_the_hosts_concerned_are_checked_again() -> None:
    cluster, _ = checked("12345678", faulty="1")
    assert [len(groups) for groups in cluster.played] == [4, 2]


def test_slow_nodes_are_paired_with_fast_ones_and_the_best_time_counts() -> None:
    speeds = {"1": 1.0, "2": 1.1, "3": 1.2, "4": 1.3, "5": 5.0, "6": 6.0}
    check = NodeCheck(tuple(FIRST_TO_LAST))
    check.report(Measurement(n, speeds[n], 1.0) for n in FIRST_TO_LAST)
    assert check.plan() == (("6", "1"), ("5", "2"))  # the slowest with the fastest
    speeds["5"] = 1.0  # it was busy with something else in the first round
    check.report(Measurement(n, speeds[n], 1.0) for n in "6152")
    assert check.plan() == ()
    verdicts = {v.node: v for v in check.verdicts()}
    assert of(verdicts, Verdict.STRAGGLER) == "6"
    assert verdicts["5"].compute == 1.0
    assert [m.compute for m in verdicts["5"].history] == [5.0, 1.0]


def test_nodes_that_agree_cost_no_further_round_and_a_slow_one_is_named_in_the_second() -> None:
    check = NodeCheck(tuple("1234"))
    assert of(Cluster().check(check), Verdict.GOOD) == "1234"
    assert len(check.rounds) == 1
    check = NodeCheck(tuple("1234"))
    assert of(Cluster(compute={"4": 9.0}).check(check), Verdict.STRAGGLER) == "4"
    assert len(check.rounds) == 2


# ---- failures in small clusters ----------------------------------------------------------


@pytest.mark.parametrize("faulty", ["1", "2"])
def test_of_two_nodes_the_one_that_also_fails_alone_is_faulty(faulty: str) -> None:
    check = NodeCheck(("1", "2"))
    check.report(failed(n, "broken") for n in "12")
    assert check.plan() == (("1",), ("2",))
    check.report(
        failed(n, "out of memory") if n == faulty else Measurement(n, 1.0, 0.0) for n in "12"
    )
    assert check.plan() == ()
    verdicts = {v.node: v for v in check.verdicts()}
    assert of(verdicts, Verdict.FAULTY) == faulty
    assert of(verdicts, Verdict.GOOD) == "12".replace(faulty, "")
    assert verdicts[faulty].reason == "failed alone: out of memory"


def test_two_nodes_with_a_broken_link_are_undecided_and_not_faulty() -> None:
    _, verdicts = checked("12", broken_link="12")
    assert of(verdicts, Verdict.UNDECIDED) == "12"
    assert "alone it passes" in verdicts["1"].reason


@pytest.mark.parametrize("faulty", ["1", "2", "3"])
def test_of_three_nodes_the_faulty_one_is_found(faulty: str) -> None:
    _, verdicts = checked("123", faulty=faulty)
    assert of(verdicts, Verdict.FAULTY) == faulty
    assert of(verdicts, Verdict.GOOD) == "123".replace(faulty, "")


@pytest.mark.parametrize("faulty", ["13", "14", "23", "24", "12", "34"])
def test_of_four_nodes_two_faulty_ones_are_found(faulty: str) -> None:
    _, verdicts = checked("1234", faulty=faulty)
    assert of(verdicts, Verdict.FAULTY) == faulty
    assert of(verdicts, Verdict.UNDECIDED) == ""


def test_a_node_that_failed_with_two_partners_is_faulty_when_nobody_is_proved_good() -> None:
    _, verdicts = checked("1234", faulty="1234")
    assert of(verdicts, Verdict.FAULTY) == "1234"
    assert verdicts["1"].reason == "failed with 2 and with 3 and with 4"


def test_a_cluster_of_bad_nodes_is_given_up_early() -> None:
    cluster, _ = checked("".join(chr(ord("A") + n) for n in range(40)), faulty="".join(
        chr(ord("A") + n) for n in range(40)
    ))  # fmt: skip
    assert len(cluster.played) == 3


def test_a_single_node_is_checked_alone() -> None:
    _, good = checked("1")
    assert of(good, Verdict.GOOD) == "1"
    _, bad = checked("1", faulty="1")
    assert of(bad, Verdict.FAULTY) == "1"


def test_a_broken_link_makes_neither_of_its_ends_faulty_when_others_are_good() -> None:
    _, verdicts = checked("1234", broken_link="34")
    assert of(verdicts, Verdict.GOOD) == "1234"


def test_two_good_nodes_that_fail_together_later_are_suspects_again() -> None:
    cluster = Cluster(compute={"4": 9.0})
    check = NodeCheck(tuple("1234"))
    check.report(m for group in check.plan() for m in cluster.run(group))
    (pair,) = check.plan()  # 4 with a fast one, and now it breaks down
    assert pair[0] == "4"
    cluster.faulty = {"4"}
    verdicts = cluster.check(check)
    assert of(verdicts, Verdict.FAULTY) == "4"
    assert of(verdicts, Verdict.GOOD) == "123"


def test_a_node_without_a_result_has_failed_and_counts_as_an_hour() -> None:
    check = NodeCheck(("1", "2", "3", "4"))
    check.report([Measurement(n, 1.0, 1.0) for n in "123"])
    assert check.rounds[0][1].members[1] == Measurement("4", FAILED_S, FAILED_S, "no result")


def test_a_node_that_never_came_up_is_faulty_and_takes_no_part() -> None:
    check = NodeCheck(tuple("123"))
    check.give_up("2", "its agent did not come up")
    verdicts = Cluster().check(check)
    assert check.rounds[0][0].names == ("1", "3")
    assert of(verdicts, Verdict.FAULTY) == "2"
    assert verdicts["2"].reason == "its agent did not come up"
    assert of(verdicts, Verdict.GOOD) == "13"


def test_who_was_beside_a_node_that_went_away_is_tried_again_and_not_blamed() -> None:
    cluster = Cluster(faulty="1")
    check = NodeCheck(tuple("1234"))
    check.report(m for group in check.plan() for m in cluster.run(group))
    (_, beside) = next(group for group in check.plan() if group[0] == "2")
    check.give_up(beside, "its agent was lost")  # proved good, and now it breaks the task of 2
    check.report(failed(n, "lost") for group in check.plan() for n in group)
    verdicts = cluster.check(check)
    assert of(verdicts, Verdict.FAULTY) == "".join(sorted("1" + beside))
    assert verdicts["2"].verdict is Verdict.GOOD


# ---- slowness ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compute", "network"])
@pytest.mark.parametrize(
    ("factor", "slow"), [(1.9, ""), (2.0, ""), (2.01, "4")], ids=["1.9x", "2x", "2.01x"]
)
def test_more_than_twice_the_usual_time_is_slow_and_exactly_twice_is_not(
    kind: str, factor: float, slow: str
) -> None:
    _, verdicts = checked(FIRST_TO_LAST, **{kind: {"4": factor}})
    assert of(verdicts, Verdict.STRAGGLER) == slow


@pytest.mark.parametrize(
    ("nodes", "slow"), [("12", "2"), ("123", "3"), ("123", "23"), ("1234", "4"), ("1234", "34")]
)
def test_slow_computing_is_found_among_two_three_and_four(nodes: str, slow: str) -> None:
    _, verdicts = checked(nodes, compute=dict.fromkeys(slow, 3.0))
    assert of(verdicts, Verdict.STRAGGLER) == slow
    assert "computing takes 3 s, 3.0 times the usual" in verdicts[slow[0]].reason


@pytest.mark.parametrize(("nodes", "slow"), [("123", "2"), ("1234", "3"), ("1234", "34")])
def test_a_slow_network_is_told_from_a_slow_partner(nodes: str, slow: str) -> None:
    _, verdicts = checked(nodes, network=dict.fromkeys(slow, 3.0))
    assert of(verdicts, Verdict.STRAGGLER) == slow
    assert verdicts[slow[0]].reason.startswith("network takes 3 s")


@pytest.mark.parametrize(("slow", "faulty"), list(itertools.permutations("1234", 2)))
def test_a_slow_network_shows_although_the_slow_node_was_part_of_every_pair(
    slow: str, faulty: str
) -> None:
    _, verdicts = checked("1234", network={slow: 9.0}, faulty=faulty)
    assert of(verdicts, Verdict.STRAGGLER) == slow
    assert of(verdicts, Verdict.FAULTY) == faulty


def test_what_two_names_on_one_network_stack_exchange_says_nothing_of_links() -> None:
    check = NodeCheck(tuple("1234"))
    check.report(
        Measurement(n, 1.0, 0.01 if n in "12" else 1.0, linked=n not in "12") for n in "1234"
    )
    assert check.plan() == ()
    verdicts = {v.node: v for v in check.verdicts()}
    assert of(verdicts, Verdict.GOOD) == "1234"
    assert (verdicts["1"].network, verdicts["3"].network) == (None, 1.0)


def test_a_slow_node_among_faulty_ones_is_found_too() -> None:
    _, verdicts = checked("12345678", faulty="17", compute={"8": 4.0}, network={"3": 5.0})
    assert of(verdicts, Verdict.FAULTY) == "17"
    assert of(verdicts, Verdict.STRAGGLER) == "38"
    assert of(verdicts, Verdict.GOOD) == "2456"


def test_one_clock_that_runs_too_fast_makes_nobody_a_straggler() -> None:
    _, verdicts = checked("12345678", compute={"1": 0.1})
    assert of(verdicts, Verdict.STRAGGLER) == ""


# ---- with an earlier check ---------------------------------------------------------------


def known(*, compute: float = 1.0, network: float = 1.0) -> tuple[NodeVerdict, ...]:
    """What an earlier check found of good nodes a to d."""
    return tuple(NodeVerdict(n, Verdict.GOOD, "", compute, network, ()) for n in "abcd")


def test_a_node_checked_alone_is_slow_beside_what_was_usual_before() -> None:
    check = NodeCheck(("1",), known=known())
    cluster = Cluster(compute={"1": 3.0})
    verdicts = cluster.check(check)
    assert cluster.played == [(("1",),), (("1",),)], "twice: once may have been a passing trouble"
    assert of(verdicts, Verdict.STRAGGLER) == "1"
    assert "3.0 times the usual" in verdicts["1"].reason


@pytest.mark.parametrize("times", [1.0, 1.9, 2.0])
def test_a_node_checked_alone_is_good_where_it_is_no_slower_than_usual(times: float) -> None:
    cluster = Cluster(compute={"1": times})
    verdicts = cluster.check(NodeCheck(("1",), known=known()))
    assert of(verdicts, Verdict.GOOD) == "1"
    assert len(cluster.played) == 1


def test_two_nodes_that_are_slow_alike_are_told_by_what_was_usual_before() -> None:
    verdicts = Cluster(compute={"1": 4.0, "2": 4.0}).check(NodeCheck(("1", "2"), known=known()))
    assert of(verdicts, Verdict.STRAGGLER) == "12"


def test_of_two_nodes_with_a_slow_exchange_neither_is_blamed() -> None:
    verdicts = Cluster(network={"2": 4.0}).check(NodeCheck(("1", "2"), known=known()))
    assert of(verdicts, Verdict.UNDECIDED) == "12"
    assert "network takes 4 s, 4.0 times the usual, but not yet" in verdicts["1"].reason


def test_bad_nodes_and_the_checked_ones_themselves_do_not_say_what_is_usual() -> None:
    earlier = (
        NodeVerdict("1", Verdict.GOOD, "", 1.0, 1.0, ()),
        NodeVerdict("a", Verdict.STRAGGLER, "", 0.1, 0.1, ()),
    )
    verdicts = Cluster(compute={"1": 3.0}).check(NodeCheck(("1",), known=earlier))
    assert of(verdicts, Verdict.GOOD) == "1"


# ---- what always holds -------------------------------------------------------------------


def test_one_failure_that_was_nobodys_fault_makes_no_node_faulty() -> None:
    check = NodeCheck(tuple("123"))
    check.report(failed(n, "a passing trouble") for n in "123")
    verdicts = Cluster().check(check)
    assert of(verdicts, Verdict.GOOD) == "123"
