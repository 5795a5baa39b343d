"""TF_CONFIG by value: who gets which task, who keeps it, and where it listens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from elastic_driver.options import TfRoles
from elastic_driver.words.tf_config import (
    WORKERS_ONLY,
    PortOffer,
    Task,
    TfLayout,
    assign,
    cluster_of,
    tf_config,
)

ALL_ROLES: TfRoles = (("chief", 1), ("ps", 2), ("worker", None), ("evaluator", 1))


def after(*worlds: Sequence[str], roles: TfRoles = WORKERS_ONLY) -> dict[str, str]:
    """The tasks in the last of these worlds, as `role:index`; each lists its oldest first."""
    tasks: dict[str, Task] = {}
    for world in worlds:
        tasks = assign(world, roles, tasks)
    return {member: f"{task.type}:{task.index}" for member, task in tasks.items()}


# ---- who is what -------------------------------------------------------------------------


def test_roles_are_handed_out_in_their_order_the_oldest_first() -> None:
    assert after("abc") == {"a": "worker:0", "b": "worker:1", "c": "worker:2"}
    assert after("abcdef", roles=ALL_ROLES) == {
        "a": "chief:0",
        "b": "ps:0",
        "c": "ps:1",
        "d": "worker:0",
        "e": "worker:1",
        "f": "evaluator:0",
    }


def test_survivors_keep_their_index_and_newcomers_take_what_is_free() -> None:
    assert after("abcd", "acde") == {
        "a": "worker:0",
        "c": "worker:2",
        "d": "worker:3",
        "e": "worker:1",
    }


def test_who_has_an_index_that_is_no_more_takes_the_free_one() -> None:
    assert after("abcd", "acd") == {"a": "worker:0", "c": "worker:2", "d": "worker:1"}


def test_worker_0_is_the_oldest_even_where_a_newcomer_comes_with_the_loss() -> None:
    assert after("abc", "bce") == {"b": "worker:0", "c": "worker:2", "e": "worker:1"}
    assert after("abc", "bc") == {"b": "worker:0", "c": "worker:1"}


def test_a_lost_chief_is_followed_by_the_oldest_worker() -> None:
    roles: TfRoles = (("chief", 1), ("worker", None))
    assert after("abc", "bce", roles=roles) == {"b": "chief:0", "c": "worker:0", "e": "worker:1"}
    assert after("abc", "c", roles=roles) == {"c": "chief:0"}


def test_a_lost_parameter_server_is_replaced_by_a_newcomer_or_by_the_last_worker() -> None:
    roles: TfRoles = (("ps", 1), ("worker", None))
    assert after("abcd", "bcde", roles=roles)["e"] == "ps:0"
    assert after("abcd", "bcd", roles=roles) == {"b": "worker:0", "c": "worker:1", "d": "ps:0"}


def test_a_second_change_remembers_who_is_older_not_who_has_the_lower_index() -> None:
    grown = assign("acde", WORKERS_ONLY, assign("abcd", WORKERS_ONLY, {}))  # e took index 1
    assert assign("cde", WORKERS_ONLY, grown)["c"] == Task("worker", 0)


# ---- the variable ------------------------------------------------------------------------


def test_an_evaluator_knows_the_cluster_and_is_not_in_it() -> None:
    tasks = assign("abc", (("chief", 1), ("worker", None), ("evaluator", 1)), {})
    cluster = cluster_of(tasks, {"a": "n1:5000", "b": "n2:5000", "c": "n3:5000"})
    assert cluster == {"chief": ["n1:5000"], "worker": ["n2:5000"]}
    assert json.loads(tf_config(cluster, tasks["c"])) == {
        "cluster": {"chief": ["n1:5000"], "worker": ["n2:5000"]},
        "task": {"type": "evaluator", "index": 0},
    }


def test_addresses_stand_at_their_index_also_above_nine() -> None:
    members = [f"m{i:02}" for i in range(12)]
    cluster = cluster_of(assign(members, WORKERS_ONLY, {}), {m: f"{m}:1" for m in members})
    assert cluster["worker"] == [f"{m}:1" for m in members]


# ---- where it listens --------------------------------------------------------------------


def workers(layout: TfLayout, **rooms: PortOffer) -> list[str]:
    """The workers' addresses by index, one slot 0 a host."""
    configs = layout.settle({(host, 0): room for host, room in rooms.items()})
    return list(json.loads(next(iter(configs.values())))["cluster"]["worker"])


def test_a_slot_keeps_its_port_over_rounds() -> None:
    layout = TfLayout(WORKERS_ONLY)
    a, b, c = (PortOffer(f"10.0.0.{n}", (7000 + n, 8000 + n)) for n in (1, 2, 3))
    assert workers(layout, a=a, b=b) == ["10.0.0.1:7001", "10.0.0.2:7002"]
    assert workers(layout, a=a, b=b, c=c) == ["10.0.0.1:7001", "10.0.0.2:7002", "10.0.0.3:7003"]
    assert workers(layout, a=a, c=c) == ["10.0.0.1:7001", "10.0.0.3:7003"]


def test_slots_and_hosts_that_share_an_address_never_share_a_port() -> None:
    layout = TfLayout(WORKERS_ONLY)
    one, other = PortOffer("127.0.0.1", (7000, 7001)), PortOffer("127.0.0.1", (7000, 7009))
    configs = layout.settle({("a", 0): one, ("a", 1): one, ("b", 0): other})
    found = json.loads(configs["a", 0])["cluster"]["worker"]
    assert found == ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7009"]


def test_an_agent_that_was_started_again_offers_other_ports_and_one_of_those_is_taken() -> None:
    layout = TfLayout(WORKERS_ONLY)
    workers(layout, a=PortOffer("10.0.0.1", (61000,)), b=PortOffer("10.0.0.2", (61000,)))
    again = workers(layout, a=PortOffer("10.0.0.1", (61000,)), b=PortOffer("10.0.0.2", (61777,)))
    assert again == ["10.0.0.1:61000", "10.0.0.2:61777"]


def test_an_agent_without_ports_to_offer_gets_ones_beside_torchs_own() -> None:
    layout = TfLayout(WORKERS_ONLY)
    configs = layout.settle({("a", slot): PortOffer("::1", ()) for slot in range(2)})
    assert json.loads(configs["a", 1])["cluster"]["worker"] == ["[::1]:29501", "[::1]:29502"]


def test_servers_do_not_carry_the_training_on() -> None:
    def essential(roles: TfRoles, count: int) -> list[bool]:
        layout = TfLayout(roles)
        layout.settle({("a", slot): PortOffer("x", ()) for slot in range(count)})
        return [layout.essential(("a", slot)) for slot in range(count)]

    assert essential((("ps", 1), ("worker", None), ("evaluator", 1)), 3) == [False, True, False]
    assert essential((("chief", 1), ("worker", None)), 2) == [True, True]
    assert essential((("chief", 1), ("ps", 1), ("worker", None)), 3) == [True, False, False]
