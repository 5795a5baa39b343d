"""Jobs with TF_CONFIG: every start of a worker carries it, and survivors keep index and port."""

from __future__ import annotations

import json
from typing import Any

from elastic_driver.job.decisions import EndJob
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from elastic_driver.words.tf_config import WORKERS_ONLY
from tests.job.scenario import MakeScenario, Scenario

PS_ROLES = (("chief", 1), ("ps", 1), ("worker", None))


def births(s: Scenario, count: int) -> dict[str, Any]:
    """TF_CONFIG of the last `count` workers that were started."""
    orders = s.orders(msg.StartWorkerOrder)[-count:]
    return {order.worker: json.loads(order.tf_config or "null") for order in orders}


def hosts_with_ports(s: Scenario, *names: str) -> None:
    """Bring up agents that offer ports for slots."""
    for name in names:
        n = ord(name)
        s.send(ev.AgentReady(name, 1, n, f"10.0.0.{n}", (5000,), (n * 100, n * 100 + 1)))


def test_each_round_has_a_tf_config_and_survivors_keep_index_and_port(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=2, tf_roles=WORKERS_ONLY, agents=False)
    s.hosts(a=1, b=1)
    hosts_with_ports(s, "a", "b")
    two = ["10.0.0.97:9700", "10.0.0.98:9800"]
    assert births(s, 2) == {
        "a.0.1": {"cluster": {"worker": two}, "task": {"type": "worker", "index": 0}},
        "b.0.1": {"cluster": {"worker": two}, "task": {"type": "worker", "index": 1}},
    }
    s.wait(s.job.settings.plain_after)
    s.hosts(a=1, b=1, c=1)
    hosts_with_ports(s, "c")
    s.wait(1.0)
    s.obey_stops()
    grown = births(s, 3)
    assert grown["c.0.1"]["cluster"]["worker"] == [*two, "10.0.0.99:9900"]
    assert [grown[w]["task"]["index"] for w in ("a.0.2", "b.0.2", "c.0.1")] == [0, 1, 2]
    s.hosts(b=1, c=1)
    s.wait(1.0)
    s.obey_stops()
    shrunk = births(s, 2)
    assert [shrunk[w]["task"]["index"] for w in ("b.0.3", "c.0.2")] == [0, 1]
    assert shrunk["c.0.2"]["cluster"]["worker"] == ["10.0.0.98:9800", "10.0.0.99:9900"]


def test_a_job_that_did_not_ask_has_none(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    s.hosts(a=1)
    assert s.orders(msg.StartWorkerOrder)[0].tf_config is None


def test_parameter_servers_and_their_workers_are_stopped_when_the_chief_is_done(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, min_np=3, tf_roles=PS_ROLES)
    s.hosts(a=3)
    s.wait(s.job.settings.plain_after)
    s.exit("a.0.1", 0)
    assert s.all(EndJob)[0].exit_code == 0
    assert {o.worker for o in s.orders(msg.StopWorkerOrder)} == {"a.1.1", "a.2.1"}


def test_workers_that_mirror_each_other_are_waited_for(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, tf_roles=(("chief", 1), ("worker", None)))
    s.hosts(a=2)
    s.wait(s.job.settings.plain_after)
    s.exit("a.0.1", 0)
    assert s.all(EndJob) == []
    s.exit("a.1.1", 0)
    assert s.all(EndJob)[0].exit_code == 0
