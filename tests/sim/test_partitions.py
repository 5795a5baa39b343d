"""Partitions part agents from the driver, and a core that forgets about them is found out."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.job.events import AgentLost
from elastic_driver.job.fleet import HostAgent
from elastic_driver.job.lost_hosts import Agents
from tests.sim.agents import SimAgent
from tests.sim.runner import SeedFailed, run_seed


def test_some_agents_go_on_after_a_partition_and_some_were_given_up() -> None:
    outcomes = [run_seed(seed, mortal=seed % 2 == 1) for seed in range(30)]
    given_up, went_on = (
        sum(counts) for counts in zip(*(o.reunited for o in outcomes), strict=True)
    )
    assert given_up > 5
    assert went_on > 5


def test_an_agent_that_is_given_up_and_not_refused_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_up(self: Agents, agent: HostAgent, reason: str, now: float, *what: Any) -> None:
        lost = AgentLost(agent.host, agent.incarnation, reason, unreachable=True)
        self.on_lost(lost, now, *what)  # nobody seals its keys

    monkeypatch.setattr(Agents, "give_up", give_up)
    with pytest.raises(SeedFailed, match="is started beside"):
        _run_all(range(40))


def test_reports_that_are_not_sent_again_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimAgent, "flush", lambda _self: None)
    with pytest.raises(SeedFailed, match=r"quiet, but|should have finished"):
        _run_all(range(100))


def _run_all(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)
