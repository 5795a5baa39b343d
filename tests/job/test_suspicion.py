"""Agents that may be lost: which evidence is a verdict, and which is only a reason to ask."""

from __future__ import annotations

import time

import pytest

from elastic_driver.job.decisions import KillAgent, ProbeAgent
from elastic_driver.job.events import AgentHeard, AgentProbed, AgentSuspected, EventBatch
from elastic_driver.job.lost_hosts import AGAIN_S, CONFIRM_S, PROBE_S, WITNESSES
from elastic_driver.words import wire_events as ev
from tests.job.scenario import Scenario


def trains(*, probed: bool = True, hosts: str = "abc") -> Scenario:
    """A job on hosts of one worker each; with `probed`, probes reach every agent."""
    s = Scenario(agents=False, start_np=len(hosts))
    s.hosts(**dict.fromkeys(hosts, 1))
    for n, host in enumerate(hosts, start=1):
        s.send(ev.AgentReady(host, 1, 10 + n, f"10.0.0.{n}", (5000,), probe_port=7000))
        if probed:
            answer(s, host)
    s.ready(*s.starting)
    s.step(*s.members)
    return s


def probes(s: Scenario, host: str) -> list[ProbeAgent]:
    return [probe for probe in s.all(ProbeAgent) if probe.host == host]


def answer(s: Scenario, host: str, result: str = "answered", seconds: float = 0.001) -> None:
    number = probes(s, host)[-1].number
    s.send(AgentProbed(host, 1, number, result, seconds))  # type: ignore[arg-type]


def witnesses(s: Scenario) -> list[ProbeAgent]:
    """The probes of the hosts that were asked last whether the driver's machine is cut off."""
    asked = [probe for probe in s.all(ProbeAgent) if probe.reason == "is this machine cut off?"]
    return asked[-WITNESSES:]


def one_answers(s: Scenario, result: str = "answered") -> None:
    """The last of those hosts answers, or another result is known."""
    last = witnesses(s)[-1]
    s.send(AgentProbed(last.host, 1, last.number, result, 0.001))  # type: ignore[arg-type]


def suspect(s: Scenario, host: str, evidence: str) -> None:
    s.send(AgentSuspected(host, 1, evidence, f"evidence: {evidence}"))  # type: ignore[arg-type]


def lost(s: Scenario) -> list[str]:
    return [str(announced.host) for announced in s.announced("agent_lost")]


@pytest.mark.parametrize("evidence", ["silent", "disconnected", "backend"])
def test_a_host_is_lost_if_it_says_that_the_suspected_agent_is_gone(evidence: str) -> None:
    s = trains()
    suspect(s, "b", evidence)
    assert lost(s) == []
    answer(s, "b", "refused", 0.003)
    assert lost(s) == ["b"]
    assert [kill.host for kill in s.all(KillAgent)] == ["b"]
    (announced,) = s.announced("agent_lost")
    assert announced.reason.startswith(
        f"evidence: {evidence}; its host says after 0.003 s that the agent is gone"
    )


def test_a_silent_host_that_answers_no_probe_is_lost() -> None:
    s = trains()
    suspect(s, "b", "silent")
    answer(s, "b", "silent", PROBE_S)
    assert lost(s) == []
    one_answers(s)
    assert lost(s) == ["b"]
    assert s.notice.silent  # nothing else ends the collectives of the others


def test_a_worker_that_was_killed_is_not_silent() -> None:
    s = trains()
    s.exit("b.0.1", -9)
    assert not s.notice.silent


@pytest.mark.parametrize("evidence", ["disconnected", "backend"])
def test_one_piece_of_evidence_is_no_verdict_if_the_agent_answers(evidence: str) -> None:
    s = trains()
    suspect(s, "b", evidence)
    answer(s, "b")
    s.wait(60.0)
    assert lost(s) == []
    assert len(s.announced("agent_cleared")) == 1


def test_a_closed_connection_and_an_unanswered_probe_wait_for_silence() -> None:
    s = trains()
    suspect(s, "b", "disconnected")
    answer(s, "b", "silent", PROBE_S)
    assert lost(s) == []
    assert len(probes(s, "b")) == 3  # the first, the one for the evidence, and another
    suspect(s, "b", "silent")
    answer(s, "b", "silent", PROBE_S)
    one_answers(s)
    assert lost(s) == ["b"]


def test_a_silent_agent_that_answers_is_probed_until_its_next_heartbeat() -> None:
    s = trains()
    suspect(s, "b", "silent")
    for _ in range(5):
        answer(s, "b")
        asked = len(probes(s, "b"))
        s.wait(AGAIN_S)
        assert len(probes(s, "b")) == asked + 1
    s.send(AgentHeard("b", 1))
    s.wait(60.0)
    assert len(probes(s, "b")) == asked + 1
    assert lost(s) == []


def test_if_every_host_is_silent_the_driver_may_be_the_one_that_is_cut_off() -> None:
    s = trains()
    for host in "abc":
        suspect(s, host, "silent")
    for host in "abc":
        answer(s, host, "silent", PROBE_S)
    s.wait(3 * AGAIN_S)
    assert lost(s) == []
    s.send(AgentHeard("a", 1))
    for host in "bc":
        answer(s, host, "silent", PROBE_S)  # it began while this machine was perhaps cut off
    assert lost(s) == []
    for host in "bc":
        answer(s, host, "silent", PROBE_S)
    one_answers(s)
    assert lost(s) == ["b", "c"]


def test_hosts_whose_silence_is_noticed_later_do_not_prove_that_the_driver_is_connected() -> None:
    """The driver's machine is cut off; heartbeats of some hosts are expected sooner than others."""
    s = trains(hosts="abcd")
    for host in "ab":
        suspect(s, host, "silent")
    for host in "ab":
        answer(s, host, "silent", PROBE_S)
    assert [probe.host for probe in witnesses(s)] == ["c", "d"], "once for all"
    for host in "cd":
        suspect(s, host, "silent")
    for probe in witnesses(s):
        s.send(AgentProbed(probe.host, 1, probe.number, "silent", PROBE_S))
    s.wait(AGAIN_S)
    for host in "abcd":
        answer(s, host, "silent", PROBE_S)
    assert lost(s) == []
    for host in "abcd":
        s.send(AgentHeard(host, 1))
    s.wait(60.0)
    assert lost(s) == []


def test_a_probe_that_began_again_outdates_the_one_before() -> None:
    s = trains()
    suspect(s, "b", "silent")
    answer(s, "b", "silent", PROBE_S)
    s.wait(AGAIN_S)
    one_answers(s)
    assert lost(s) == [], "b is asked again"
    answer(s, "b", "silent", PROBE_S)
    one_answers(s, "refused")
    assert lost(s) == ["b"], "the machine of a witness answers, though its agent is gone"


def test_a_driver_that_resumes_waits_for_no_witness_of_the_one_that_died() -> None:
    s = trains()
    suspect(s, "b", "silent")
    answer(s, "b", "silent", PROBE_S)
    assert len(s.job.suspicion._witnesses) == 2
    s.resume()
    assert s.job.suspicion._witnesses == set(), "else no other would ever be asked"


def test_where_no_witness_can_be_asked_a_silent_host_that_answers_no_probe_is_lost() -> None:
    s = trains(probed=False)
    answer(s, "b")
    suspect(s, "b", "silent")
    answer(s, "b", "silent", PROBE_S)
    assert witnesses(s) == []
    assert lost(s) == ["b"]


def test_a_probe_that_began_while_the_driver_was_cut_off_costs_no_host() -> None:
    s = trains()
    for host in "abc":
        suspect(s, host, "silent")
    for host in "abc":
        answer(s, host, "silent", PROBE_S)
    s.wait(AGAIN_S)
    s.send(AgentHeard("a", 1))
    asked = len(probes(s, "b"))
    answer(s, "b", "silent", PROBE_S)
    assert len(probes(s, "b")) == asked + 1  # asked again at once
    answer(s, "b")
    s.send(AgentHeard("b", 1))
    s.send(AgentHeard("c", 1))
    s.wait(60.0)
    assert lost(s) == []


def test_half_of_the_hosts_are_lost_in_one_round() -> None:
    s = trains(hosts="abcd")
    for host in "cd":
        suspect(s, host, "silent")
    answer(s, "c", "silent", PROBE_S)
    s.ready("a.0.1", "b.0.1", version=1)
    one_answers(s)
    assert s.round == (1, "closing")  # not complete: d is not decided yet
    answer(s, "d", "silent", PROBE_S)
    one_answers(s)
    assert s.world.round == 2
    assert [member.place.host for member in s.world.members] == ["a", "b"]


def test_where_no_probe_arrives_two_kinds_of_evidence_agree() -> None:
    s = trains(probed=False)
    for host in "abc":
        answer(s, host, "refused")  # by a firewall
    suspect(s, "b", "disconnected")
    answer(s, "b", "refused")
    s.wait(5.0)
    assert lost(s) == []
    suspect(s, "b", "backend")
    assert lost(s) == []
    s.wait(CONFIRM_S)
    assert lost(s) == ["b"]


def test_an_agent_that_is_heard_meanwhile_is_not_lost_by_agreeing_evidence() -> None:
    s = trains(probed=False)
    suspect(s, "b", "disconnected")
    suspect(s, "b", "backend")
    s.send(AgentHeard("b", 1))
    s.wait(60.0)
    assert lost(s) == []


def test_the_error_of_a_survivor_leads_to_a_probe_of_the_host_it_names() -> None:
    s = trains()
    broken = "Read error [10.0.0.2]:4711: Connection reset by peer"
    s.send(ev.WorkerReady("a.0.1", 1, 1, True, broken))
    assert (len(probes(s, "b")), len(probes(s, "c"))) == (2, 1)
    answer(s, "b")  # the host is there: only a worker of it has crashed
    assert lost(s) == s.announced("agent_suspected") == s.announced("agent_cleared") == []
    s.send(ev.WorkerReady("c.0.1", 1, 1, True, broken))
    answer(s, "b", "refused")
    assert lost(s) == ["b"]


def test_old_news_of_an_agent_changes_nothing() -> None:
    s = trains()
    suspect(s, "b", "silent")
    late = probes(s, "b")[-1].number
    s.agent_lost("b", "its process ended")
    s.send(AgentProbed("b", 1, late, "refused", 0.1))
    s.send(AgentSuspected("b", 1, "silent", "late"))
    s.send(AgentHeard("b", 1))
    assert lost(s) == ["b"]
    assert s.job.effects.ignored_events == 3


def test_the_verdicts_of_many_hosts_are_reached_together() -> None:
    """One after the other, each would look at all hosts for new places of its workers."""
    names = [f"h{n}" for n in range(300)]
    s = Scenario(agents=False, start_np=len(names))
    s.hosts(**dict.fromkeys(names, 1))
    ready = (
        ev.AgentReady(host, 1, n + 1, f"10.0.1.{n}", (5000,), probe_port=7000)
        for n, host in enumerate(names)
    )
    s.send(EventBatch(tuple(ready)))
    asked = [probe for probe in s.all(ProbeAgent) if probe.host in names]
    s.send(EventBatch(tuple(AgentProbed(p.host, 1, p.number, "answered", 0.0) for p in asked)))
    late = names[:200]
    s.send(EventBatch(tuple(AgentSuspected(host, 1, "silent", "late") for host in late)))
    asked = [probe for probe in s.all(ProbeAgent) if probe.number > len(names)]
    assert [probe.host for probe in asked] == late
    began = time.process_time()
    s.send(EventBatch(tuple(AgentProbed(p.host, 1, p.number, "silent", 0.6) for p in asked)))
    one_answers(s)
    assert lost(s) == late
    assert time.process_time() - began < 1.0  # with the invariants; 5 ms each one by one


def test_a_host_whose_first_probe_gets_no_answer_is_named_once() -> None:
    s = trains(probed=False)
    for _ in range(2):
        answer(s, "b", "silent", 2.0)
    answer(s, "a")
    (told,) = s.announced("probe_unanswered")
    assert told.host == "b"
    assert "no answer from b (10.0.0.2) at TCP port 7000" in told.reason
