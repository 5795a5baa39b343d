"""Agents that may be lost: evidence is collected and confirmed by a probe, then comes the verdict.

One piece of evidence proves nothing: a proxy may close connections, a link may lose packets, a
machine may be slow. So an agent that is suspected is probed. Its host is lost if

- the agent is suspected and its host answers that the process is gone, or
- the agent is silent, the probe is not answered either, and another host answers one, so that it is
  not this machine that is cut off, or
- no probe can reach this host at all (a firewall), and two kinds of evidence agree.

An agent that answers is only observed until its next heartbeat. Without any of these the agent's
lease ends after `heartbeat_timeout` (`agents`). Times are monotonic seconds.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import ProbeAgent
from elastic_driver.core.driver_events import AgentHeard, AgentProbed, AgentSuspected, Evidence
from elastic_driver.core.rules.agents import Agents
from elastic_driver.core.rules.fleet import AgentState, HostAgent
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.core.rules.workers import Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import host_log_events as host_log

PROBE_S = 0.6  # for an answer; several attempts are made in this time, as packets may be lost
FIRST_PROBE_S = 2.0  # for the first answer of an agent that has just come up
AGAIN_S = 0.5  # between two probes of an agent that sends no heartbeat
WITNESSES = 3  # other hosts that are asked whether this machine is cut off; one answer will do
CONFIRM_S = 0.1  # between two kinds of evidence and a verdict, if no probe can help
_PEER = re.compile(r"\[([0-9A-Fa-f.:]+)\]:")  # as gloo's errors name a peer


@dataclass(slots=True)
class Suspect:
    """An agent that may be lost."""

    since: float  # the time of the first evidence
    evidence: dict[Evidence, str] = field(default_factory=dict)  # with its reason
    probe: int = 0  # the number of the probe that is not answered yet; 0: none
    probe_at: float | None = None  # the time of the next probe
    asked_cut_off: bool = False  # the probe began while no host was heard: its failure says nothing
    verdict: str = ""  # it is lost, if a witness answers
    confirmed_at: float | None = None  # the time at which two kinds of evidence are a verdict


@dataclass(slots=True)
class Suspicion(Rule):
    """Decides which suspected agents are lost."""

    agents: Agents
    suspects: dict[str, Suspect] = saved(factory=dict)  # by host
    found: dict[str, int] = saved(factory=dict)  # how often each was found
    reachable: dict[str, int] = saved(factory=dict)  # host → incarnation that answered
    at: dict[str, set[str]] = saved(factory=dict)  # hosts whose agent had this address
    unreached: set[str] = saved(factory=set)  # hosts whose first probe was not answered
    probes: int = saved(0)  # numbers given
    # Numbers of probes that have no result yet.
    _witnesses: set[int] = saved(factory=set, name="witnesses")
    # Agents that answered a driver on another host. They count as reachable by probes if any other
    # agent answers this one.
    _answered_before: dict[str, int] = saved(factory=dict, name="answered_before")

    def resume(self, now: float, *, moved: bool) -> None:
        """Probe every agent of the driver that has died; it is silent until it returns."""
        if moved:
            self._answered_before, self.reachable = {**self._answered_before, **self.reachable}, {}
        self.suspects.clear()
        self._witnesses.clear()  # their answers went to the driver that has died
        for agent in self.fleet.awaited.values():
            silent: dict[Evidence, str] = {"silent": "it has not returned to the resumed driver"}
            suspect = self.suspects[agent.host] = Suspect(now, silent)
            self._probe(agent, suspect)

    def on_ready(self, event: ev.AgentUp, now: float) -> None:
        """Find out whether probes reach the agent: only then their failure means anything."""
        self.suspects.pop(event.host, None)
        self.at.setdefault(event.address, set()).add(event.host)
        if event.probe_port and self.reachable.get(event.host) != event.incarnation:
            self._ask(self.fleet.agents[event.host], FIRST_PROBE_S, "find out if probes reach it")

    def on_suspected(self, event: AgentSuspected, now: float) -> None:
        """Record evidence against an agent."""
        self._suspect(self._up(event), event.evidence, event.reason, now)

    def on_heard(self, event: AgentHeard, now: float) -> None:
        """Clear an agent that sends heartbeats."""
        agent = self._up(event)
        suspect = self.suspects.pop(agent.host, None)
        if suspect is not None and agent.state is AgentState.READY:
            self._announce_cleared(suspect, "it was heard again", event.host, now)

    def on_left(self, worker: Worker, event: ev.WorkerReady, now: float) -> None:
        """Suspect the hosts whose connections broke, by the error for which a worker left."""
        own = self.fleet.agents.get(worker.host)
        for address in set(_PEER.findall(event.reason)):
            for host in sorted(self.at.get(address, ())):
                agent = self.fleet.agents.get(host)
                if agent is None or agent.address != address or not agent.is_up:
                    continue
                if own is not None and own.address != address:
                    self._suspect(agent, "peers", f"{worker.id} lost its connection to it", now)

    def on_probed(self, event: AgentProbed, now: float) -> None:
        """Draw the consequence of a probe's result."""
        if event.number in self._witnesses:
            self._hear_witness(event, now)
        agent, suspect = self._up(event), self.suspects.get(event.host)
        if event.result == "answered":
            self.reachable[event.host] = event.incarnation
        if suspect is None or suspect.probe != event.number:
            self._look_if_unreached(agent, event)
            return
        suspect.probe = 0
        took = f"after {event.seconds:.3f} s"
        if event.result == "answered":
            self._clear_answering(agent, suspect, now)
        elif not self._reachable(agent):
            self._agree(suspect, now)
        elif event.result == "refused":
            self._lose(agent, suspect, f"its host says {took} that the agent is gone", now)
        elif "silent" not in suspect.evidence:
            suspect.probe_at = now
        elif not self._others_are_heard():
            suspect.probe_at = now + AGAIN_S
        elif suspect.asked_cut_off:
            suspect.probe_at = now
        else:
            suspect.verdict = f"no answer to a probe {took}"
            if self._ask_witnesses():
                suspect.probe_at = now + AGAIN_S
            else:
                self._lose(agent, suspect, suspect.verdict, now)

    def _ask_witnesses(self) -> bool:
        """Probe hosts that are not suspected, if none is probed; return whether there are any."""
        others = (agent for host, agent in self.fleet.agents.items() if host not in self.suspects)
        reachable = (a for a in others if a.is_up and a.probe_port and self._reachable(a))
        if not self._witnesses:
            for agent in itertools.islice(reachable, WITNESSES):
                self._witnesses.add(self._ask(agent, PROBE_S, "is this machine cut off?"))
        return bool(self._witnesses)

    def _hear_witness(self, event: AgentProbed, now: float) -> None:
        """Give up the hosts that do not answer, if this one does: this machine is not cut off."""
        self._witnesses.discard(event.number)
        if event.result == "silent":
            return
        self._witnesses.clear()  # one answer will do
        for host, suspect in tuple(self.suspects.items()):
            agent = self.fleet.agents.get(host)
            if suspect.verdict and agent is not None and agent.is_up:
                self._lose(agent, suspect, suspect.verdict, now)

    def advance(self, now: float) -> Iterable[Wait]:
        """Probe again, and give up hosts against which two kinds of evidence agree."""
        for host, suspect in tuple(self.suspects.items()):
            agent = self.fleet.agents.get(host)
            if agent is None or not agent.is_up:
                del self.suspects[host]
            elif suspect.confirmed_at is not None:
                if now >= suspect.confirmed_at:
                    self._lose(agent, suspect, "the evidence agrees", now)
                else:
                    yield Wait(suspect.confirmed_at)
            elif suspect.probe_at is not None:
                if now >= suspect.probe_at:
                    self._probe(agent, suspect)
                else:
                    yield Wait(suspect.probe_at)

    # ---- one suspect -----------------------------------------------------------------------

    def _up(self, event: ev.AgentEvent) -> HostAgent:
        agent = self.fleet.current(event)
        if not agent.is_up:
            raise ev.StaleEvent(f"the agent on {event.host} is not up")
        return agent

    def _suspect(self, agent: HostAgent, kind: Evidence, reason: str, now: float) -> None:
        suspect = self.suspects.setdefault(agent.host, Suspect(now))
        if kind not in suspect.evidence and kind != "peers":  # which any worker's crash causes
            self.effects.announce(host_log.AgentSuspected(evidence=kind), reason, agent.host)
        self.found[kind] = self.found.get(kind, 0) + (kind not in suspect.evidence)
        suspect.evidence.setdefault(kind, reason)
        if not suspect.probe and suspect.confirmed_at is None:
            self._probe(agent, suspect)
        if not self._reachable(agent):
            self._agree(suspect, now)

    def _probe(self, agent: HostAgent, suspect: Suspect) -> None:
        suspect.probe_at, suspect.verdict = None, ""
        if agent.probe_port:
            reasons = "; ".join(suspect.evidence.values()) or "it sends no heartbeat"
            suspect.probe = self._ask(agent, PROBE_S, reasons)
            suspect.asked_cut_off = not self._others_are_heard()

    def _ask(self, agent: HostAgent, patience: float, reason: str) -> int:
        self.probes += 1
        where = agent.host, agent.incarnation, agent.address, agent.probe_port
        self.effects.decide(ProbeAgent(*where, patience, self.probes, reason))
        return self.probes

    def _clear_answering(self, agent: HostAgent, suspect: Suspect, now: float) -> None:
        """Clear an agent that answers; if it was silent, probe it until its next heartbeat."""
        suspect.confirmed_at, suspect.verdict = None, ""
        if "silent" in suspect.evidence:
            suspect.evidence = {"silent": suspect.evidence["silent"]}
            suspect.probe_at = now + AGAIN_S
        else:
            del self.suspects[agent.host]
            self._announce_cleared(suspect, "it answered a probe", agent.host, now)

    def _announce_cleared(self, suspect: Suspect, why: str, host: str, now: float) -> None:
        if suspect.evidence.keys() - {"peers"}:
            found, seconds = " ".join(suspect.evidence), round(now - suspect.since, 3)
            reason = f"{why}, {seconds:.2f} s after the first sign"
            self.effects.announce(
                host_log.AgentCleared(evidence=found, seconds=seconds), reason, host
            )

    def _look_if_unreached(self, agent: HostAgent, event: AgentProbed) -> None:
        """Say once for a host that its agents' first probes get no answer."""
        known = self._reachable(agent) or agent.host in self.unreached
        if event.result == "silent" and not known:
            self.unreached.add(agent.host)
            reason = (
                f"this machine gets no answer from {agent.host} ({agent.address}) at TCP port "
                f"{agent.probe_port}: let the firewall of {agent.host} pass it, or the loss of "
                "the host may be seen only after --heartbeat-timeout (docs/firewalls.md)"
            )
            self.effects.announce(host_log.ProbeUnanswered(), reason, agent.host)

    def _agree(self, suspect: Suspect, now: float) -> None:
        """Let two kinds of evidence be enough for a host that no probe can reach."""
        if len(suspect.evidence) > 1 and suspect.confirmed_at is None:
            suspect.confirmed_at = now + CONFIRM_S

    def _reachable(self, agent: HostAgent) -> bool:
        if self.reachable.get(agent.host) == agent.incarnation:
            return True
        return bool(self.reachable) and self._answered_before.get(agent.host) == agent.incarnation

    def _others_are_heard(self) -> bool:
        """Return whether a host is left that is not silent.

        If all are silent, this machine may be the one that is cut off; and no survivor waits.
        """
        silent = sum(
            "silent" in suspect.evidence and self.fleet.is_up(host)
            for host, suspect in self.suspects.items()
        )
        return len(self.fleet.agents) - len(self.fleet.starting) > silent

    def _lose(self, agent: HostAgent, suspect: Suspect, verdict: str, now: float) -> None:
        """Give up an agent and everything on its host."""
        del self.suspects[agent.host]
        found, seconds = "; ".join(suspect.evidence.values()), round(now - suspect.since, 3)
        reason = f"{found}; {verdict} ({seconds:.2f} s after the first sign)"
        what = host_log.AgentLost(evidence=" ".join(suspect.evidence), seconds=seconds)
        self.agents.give_up(agent, reason, now, what)
