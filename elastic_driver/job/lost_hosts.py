"""Agents and hosts that are lost or cannot be reached: evidence, probes, and what follows.

Connections between two hosts that nobody answers (`Unanswered`). Usually a firewall drops them. A
library that connects waits for minutes and then names an address at best, so the agents look at the
connections of their workers and report those that wait. A world that such a pair keeps from its
first step will never come about: the job ends after `--start-timeout`.

Hosts that are not reachable (`Unreachable`: power, cable, sshd) are probed until they answer. That
is no misbehaviour, so there is no cool-down. A host that answers is used at once, if its slots are
needed. Where no probe is possible (a jump host), the start of an agent is tried in its place;
starts that fail are tried again after a growing pause of a few seconds at most.

Agents (`Agents`). The workers of a host end with its agent. The agent is started again in place, or
its host is put in cool-down, or is probed until it is reachable again.

Evidence (`Suspicion`). One piece of it proves nothing: a proxy may close connections, a link may
lose packets, a machine may be slow. So an agent that is suspected is probed. Its host is lost if

- the agent is suspected and its host answers that the process is gone, or
- the agent is silent, the probe is not answered either, and another host answers one, so that it is
  not this machine that is cut off, or
- no probe can reach this host at all (a firewall), and two kinds of evidence agree.

An agent that answers is only observed until its next heartbeat. Without any of these the agent's
lease ends after `heartbeat_timeout`.

Times are monotonic seconds.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_driver.errors import ExitCode
from elastic_driver.job.decisions import Announce, KillAgent, ProbeAgent, ProbeHosts
from elastic_driver.job.events import (
    AgentHeard,
    AgentLost,
    AgentProbed,
    AgentSuspected,
    Evidence,
    HostProbed,
    LeaseExpired,
    Turn,
    takes,
)
from elastic_driver.job.fleet import AgentNews, AgentState, HostAgent
from elastic_driver.job.hangs import Stacks
from elastic_driver.job.hosts import Host
from elastic_driver.job.outcome import KILLED, Cause
from elastic_driver.job.placement import Placement
from elastic_driver.job.reports import Reports
from elastic_driver.job.rounds import Rule
from elastic_driver.job.supply import Discovered
from elastic_driver.job.workers import ACTIVE, RUNNING, Worker, WorkerNews
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log

# ---- connections that nobody answers -----------------------------------------------------


@dataclass(slots=True)
class Unanswered(Rule):
    """Names the pairs of hosts that do not reach each other."""

    since: dict[str, float] = saved(factory=dict)  # "host address" → the first report

    @takes(ev.ConnectionUnanswered)
    def on_unanswered(self, event: ev.ConnectionUnanswered, now: float) -> None:
        """Name the pair once; end a job that was kept from its first step for too long."""
        self.fleet.current(event)
        others = (a.host for a in self.fleet.agents.values() if a.address == event.address)
        other = next(others, None)
        if other is None:  # a server of the user's, say
            raise ev.StaleEvent(f"{event.address} is not the address of a host of this job")
        pair = f"{event.host} {event.address}"
        reason = self._describe(event, other)
        if pair not in self.since:
            self.since[pair] = now
            worker = self.workers.workers.get(event.worker)
            self.effects.announce(host_log.ConnectionUnanswered(), reason, worker or event.host)
        waited = now - self.since[pair]
        starting = self.outcome.elastic and not self.outcome.has_progress
        if starting and waited >= self.settings.start_timeout:
            self.ending.finish(
                ExitCode.UNAVAILABLE, f"{reason}, for {waited:.0f} s (--start-timeout)"
            )

    @staticmethod
    def _describe(event: ev.ConnectionUnanswered, other: str) -> str:
        return (
            f"{event.host} gets no answer from {other} ({event.address}) at TCP port {event.port}: "
            f"let the firewall of {other} pass it, --ports sets which ports are used "
            "(docs/firewalls.md)"
        )


# ---- hosts that are not reachable --------------------------------------------------------

PATIENCE_S = 1.0  # for an answer; probes overlap, as the first packet of one may be lost
_TOLD_STARTS = 1  # later starts that fail are not announced: there may be one every few seconds


@dataclass(slots=True)
class Unreachable(Rule):
    """Has hosts probed that are not reachable."""

    discovered: Discovered
    probes: int = saved(0)  # decisions to probe hosts so far

    def lose(self, host: str, reason: str, now: float, *, started: bool) -> None:
        """Record that a host is not reachable; `started`: its agent was up."""
        if self.hosts.lose(host, now, reason, started=started, probes=self.probes):
            back = f"{reason}; it is used again as soon as it answers"
            self.effects.announce(host_log.HostUnreachable(), back, host)

    def _tell_again(self, told: list[Host], now: float) -> None:
        """Say that hosts still do not answer: less and less often, one line for all of them."""
        first = told[0]
        gone = now - (first.lost_at or now)
        others = f"; so are {len(told) - 1} more" if len(told) > 1 else ""
        what = f"gone for {gone:.0f} s, {counted(first.probed, 'try', 'tries')}{others}"
        self.effects.announce(host_log.HostStillAway(), f"{what}: {first.reason}", first.name)

    @takes(HostProbed)
    def on_probed(self, event: HostProbed, now: float) -> None:
        """Use a host again that answers, or that cannot be probed."""
        host = self.hosts.record_answer(event.host, event.number)
        if host is None:
            raise ev.StaleEvent(f"{event.host} was probed before, or is not waited for")
        if event.answered:
            self.discovered.hold(host.name, "it was not reachable")
            if host.failed_starts <= _TOLD_STARTS:
                gone = now - (host.lost_at or now)
                self.effects.announce(
                    host_log.HostResurrected(), f"answers after {gone:.1f} s", host.name
                )
        self.capacity.note_change()

    def advance(self, now: float) -> Iterable[Wait]:
        """Decide to probe the hosts whose time has come."""
        hosts = self.hosts
        if self.outcome.finishing or hosts.next_probe == math.inf:
            return ()
        due = hosts.take_due_probes(now) if hosts.next_probe <= now else ()
        if due:
            self.probes += 1
            others = f" and {len(due) - 1} more" if len(due) > 1 else ""
            reason = f"not reachable: {due[0]}{others}"
            self.effects.decide(ProbeHosts(due, PATIENCE_S, self.probes, reason))
            if told := hosts.take_still_away(due, now):
                self._tell_again(told, now)
        return (Wait(hosts.next_probe),)


# ---- agents ------------------------------------------------------------------------------

_LOST = host_log.AgentLost()  # nothing more is known


@dataclass(slots=True)
class Agents(Rule):
    """Decides what follows from the news of agents."""

    reports: Reports
    unreachable: Unreachable
    placement: Placement
    stacks: Stacks

    @takes(ev.AgentReady)
    def on_ready(self, event: ev.AgentUp, now: float) -> None:
        """Record that an agent is up, or has returned, and its host's slots can be used."""
        has_returned = event.host in self.fleet.awaited
        self.fleet.record_up(event)
        self.hosts.record_reached(event.host)
        self.capacity.note_change()
        number, at = self.rounds.current.number, f"at {event.address}"
        what = host_log.AgentReturned() if has_returned else host_log.AgentStarted()
        self.effects.decide(Announce(what, at, number, event.host, pid=event.pid))

    @takes(AgentLost)
    def on_lost(self, event: AgentLost, now: float, what: host_log.AgentLost = _LOST) -> None:
        """Record that an agent has ended, or is silent, and its workers with it."""
        agent = self.fleet.current(event)
        reason, was_up = event.reason or "no reason was given", agent.is_up
        told = event.refused or (event.unreachable and self.hosts.is_lost(event.host))
        if was_up or not told:
            self.effects.announce(what, reason, event.host)
        self.fleet.apply(agent, AgentNews.LOST)
        gone = event.unreachable
        workers = self.workers.on_host(event.host)
        self.lose_workers(workers, "its agent was lost", now, silent=gone)
        if self.ending.end is None:
            if event.refused and not was_up:
                self._leave_alone(event.host, reason, now)
                return
            self._host_without_agent(event.host, reason, now, was_up=was_up, unreachable=gone)

    @takes(LeaseExpired)
    def on_lease_expired(self, event: LeaseExpired, now: float) -> None:
        """Give up a silent agent or worker; after half the time, ask for stacks."""
        if event.kind == "agent":
            self.give_up(self.fleet.current(ev.AgentEvent(*event.agent)), event.reason, now)
            return
        worker = self.workers.with_process(event, event.owner)
        if event.kind == "half" and worker.state is RUNNING:
            # It may hang with the GIL. It is killed when its lease ends, and can then tell nothing.
            self.stacks.ask(now, f"{worker.id}: {event.reason}")
        elif event.kind == "worker":
            self.stacks.settle()  # before it is killed
            going = worker.leaving or worker.spare
            if going and self.workers.apply(worker, WorkerNews.TOLD_TO_STOP):
                self.effects.kill(worker, event.reason)
                self.rounds.break_for_early_end(worker, now, running=not worker.spare)
            else:
                self.reports.give_up_worker(worker, event.reason, now)

    def give_up(
        self, agent: HostAgent, reason: str, now: float, what: host_log.AgentLost = _LOST
    ) -> None:
        """Treat an agent as lost, and kill it: it may only be cut off, and must not go on."""
        self.effects.decide(KillAgent(agent.host, agent.incarnation, reason))
        lost = AgentLost(agent.host, agent.incarnation, reason, unreachable=True)
        self.on_lost(lost, now, what)

    def advance(self, now: float) -> Iterable[Wait]:
        """Give up an agent that takes longer than `start_timeout` to come up."""
        for agent in tuple(self.fleet.starting.values())[:1]:
            timeout = self.settings.start_timeout
            wait = Wait(agent.asked_at + timeout, f"the agent on {agent.host} starts")
            if not wait.is_over(now):
                yield wait
            else:
                self.placement.stop_agent(agent, "it did not come up in time")
                late = f"agent not up within {timeout:g} s"
                self._host_without_agent(agent.host, late, now, was_up=False)

    def lose_workers(
        self, workers: Iterable[Worker], reason: str, now: float, *, silent: bool = False
    ) -> None:
        """Record that workers are gone for no fault of theirs; together they are one failure."""
        failed = [w for w in workers if self._lose_worker(w, reason, now, silent=silent)]
        if failed and self.outcome.first_success is None and self.ending.end is None:
            self.reports.count_failure(now, member=any(worker.is_member for worker in failed))

    def _lose_worker(self, worker: Worker, reason: str, now: float, *, silent: bool) -> bool:
        """Record that a worker is gone; return whether that is a failure."""
        failed = not worker.leaving and worker.state in ACTIVE
        was_running = worker.state is RUNNING
        self.workers.record_end(worker, KILLED, as_told=bool(worker.leaving))
        self.effects.announce(worker_log.WorkerLost(), reason, worker)
        if failed:
            self.reports.record_loss(worker, Cause.AGENT, now, silent=silent)
        elif worker.leaving:
            self.rounds.break_for_early_end(worker, now, running=was_running)
        return failed

    def _leave_alone(self, host: str, reason: str, now: float) -> None:
        """Leave a host alone for a while that somebody has to mend; say so once."""
        self.capacity.note_change()
        if self.hosts.drain_of(host) is None and (
            news := self.hosts.count_refusal(host, now, reason)
        ):
            self.effects.announce(host_log.HostRefused(), news, host)

    def _host_without_agent(
        self, host: str, reason: str, now: float, *, was_up: bool, unreachable: bool = False
    ) -> None:
        """Start the agent again in place, have its host probed, or put the host in cool-down."""
        self.capacity.note_change()
        if self.hosts.drain_of(host) is not None:
            return  # the host was drained and its agent ended early: that is no failure
        if unreachable:
            self.unreachable.lose(host, reason, now, started=was_up)
            return
        needed = self.is_needed(host)
        cooldown = self.hosts.count_agent_loss(host, now, reason, started=was_up, needed=needed)
        if cooldown is not None:
            self.effects.announce(host_log.HostBlacklisted(), cooldown, host)
        elif self.hosts.is_usable(host) and not self.outcome.finishing:
            self.placement.start_agent(host, now, f"again in place: {reason}")


# ---- evidence ----------------------------------------------------------------------------

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

    @takes(ev.AgentReady, turn=Turn.AFTER)
    def on_ready(self, event: ev.AgentUp, now: float) -> None:
        """Find out whether probes reach the agent: only then their failure means anything."""
        self.suspects.pop(event.host, None)
        self.at.setdefault(event.address, set()).add(event.host)
        if event.probe_port and self.reachable.get(event.host) != event.incarnation:
            self._ask(self.fleet.agents[event.host], FIRST_PROBE_S, "find out if probes reach it")

    @takes(AgentSuspected)
    def on_suspected(self, event: AgentSuspected, now: float) -> None:
        """Record evidence against an agent."""
        self._suspect(self._up(event), event.evidence, event.reason, now)

    @takes(AgentHeard)
    def on_heard(self, event: AgentHeard, now: float) -> None:
        """Clear an agent that sends heartbeats."""
        agent = self._up(event)
        suspect = self.suspects.pop(agent.host, None)
        if suspect is not None and agent.state is AgentState.READY:
            self._announce_cleared(suspect, "it was heard again", event.host, now)

    @takes(ev.WorkerReady, turn=Turn.AFTER)
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

    @takes(AgentProbed)
    def on_probed(self, event: AgentProbed, now: float) -> None:
        """Draw the consequence of a probe's result."""
        if event.number in self._witnesses:
            self._hear_witness(event, now)
        agent = self._up(event)
        suspect = self.suspects.get(event.host)
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
            found = " ".join(suspect.evidence)
            seconds = round(now - suspect.since, 3)
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
        """Accept two kinds of evidence for a host that no probe can reach."""
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
        found = "; ".join(suspect.evidence.values())
        seconds = round(now - suspect.since, 3)
        reason = f"{found}; {verdict} ({seconds:.2f} s after the first sign)"
        what = host_log.AgentLost(evidence=" ".join(suspect.evidence), seconds=seconds)
        self.agents.give_up(agent, reason, now, what)
