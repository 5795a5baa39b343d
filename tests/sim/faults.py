"""What goes wrong in a simulated cluster, drawn from the seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Literal

from elastic_driver.job import events as seen
from elastic_driver.words import wire_events as ev
from tests.sim.agents import SimAgent
from tests.sim.cluster import Cluster
from tests.sim.driver import MOMENTS, Cut
from tests.sim.partitions import Partitions
from tests.sim.workers import Group, SimWorker

HEARTBEAT_S = 2.0
HANG_S = 1.5
SILENT_S = 1.0
FAVOUR = 6
GIB = 2**30


class Faults:
    """Injects one random fault at a time, until told to stop; then everything heals."""

    def __init__(
        self, cluster: Cluster, hosts: dict[str, int], seed: int, *, own_exits: bool
    ) -> None:
        self.cluster, self.random = cluster, cluster.random
        self.hosts = dict(hosts)  # what discovery would report
        self.gone: dict[str, int] = {}
        self.all_hosts = dict(hosts)
        self.own_exits = own_exits
        self.injected: list[str] = []
        self._kinds: list[tuple[float, Callable[[], None]]] = [
            (5, self._kill),
            (2, self._freeze),
            (1, self._thaw),
            (2, self._deadlock),
            (1, self._mismatch),
            (1, self._kill_agent),
            (1, self._cut_host),
            (1, self._hiccup),
            (1, self._power_off),
            (2, self._remove_host),
            (2, self._return_host),
            (1, self._flap),
            (1, self._resize),
            (1, self._add_host),
            (1, self._exchange_hosts),
            (1, self._scale),
            (1, self._drain),
            (1, self._undrain),
            (2, self._notice),
            (1, self._discovery_fails),
            (2 if own_exits else 0, self._exit),
            (6 if cluster.settings.replace_slow else 0, self._slow),
            (2 if own_exits else 0, self._run_out),
        ]
        self._memory = Random(f"memory of {seed}")
        if cluster.driver.mortal:
            self._kinds += [(4, self._crash_driver), (1, self._cut_from_etcd)]
            cluster.back.append(self.driver_is_back)
        self._favour(Random(f"favoured by {seed}"))
        self.partitions = Partitions(self, seed)

    def _favour(self, random: Random) -> None:
        """Let some faults come much more often, in half of all seeds: some only meet then."""
        favoured = random.sample(range(len(self._kinds)), random.choice([0, 0, 0, 1, 2, 3]))
        for index in favoured:
            weight, fault = self._kinds[index]
            self._kinds[index] = (weight * FAVOUR, fault)

    def discover(self) -> None:
        """Report the present hosts."""
        self.cluster.deliver(seen.HostsDiscovered(tuple(self.hosts.items())))

    def inject_until(self, end: float) -> None:
        """A fault now and then, until this moment."""
        clock = self.cluster.clock
        if clock.now >= end or self.cluster.end is not None:
            return
        weights = [weight for weight, _ in self._kinds]
        fault = self.random.choices([fault for _, fault in self._kinds], weights)[0]
        self.injected.append(f"{clock.now:.3f} {fault.__name__.strip('_')}")
        self.cluster.note("!!", fault.__name__.strip("_"))
        fault()
        # Often far apart, sometimes on top of each other.
        gap = self.random.uniform(0.0, 0.1) if self.random.random() < 0.3 else None
        delay = self.random.expovariate(0.7) if gap is None else gap
        clock.after(delay, lambda: self.inject_until(end))

    def heal(self) -> None:
        """No more faults: every host is back, frozen processes are found out."""
        self.cluster.agent_trouble = 0.0
        self.partitions.heal_all()
        self.cluster.dark.clear()
        self.hosts, self.gone = dict(self.all_hosts), {}
        self.discover()
        # Again a little later: an agent's notice may still be under way, or the agent cut off; and
        # once the job no longer holds a notice, as others may come.
        held = 1.0 + self.cluster.job.settings.notice_spread
        for delay in (0.0, 1.0, held, 8.0) if self.cluster.driver.mortal else (0.0, 1.0, held):
            for host in self.hosts:
                self.cluster.clock.after(delay, partial(self._let_back, host))

    def notice_to_all(self, deadline: float, *, hosts: bool) -> None:
        """The whole job has to go: itself is told, or every agent, which then ends in time."""
        self.injected.append(f"{self.cluster.clock.now:.3f} notice_to_all")
        if not hosts:
            self.cluster.deliver(seen.JobLeaving("its time is over", deadline))
            return
        for host, agent in self.cluster.agents.items():
            if agent.alive:
                delay = self.random.uniform(0.0, 0.3)
                self.cluster.clock.after(delay, partial(self._tell_host, host, deadline))

    # ---- drivers -----------------------------------------------------------------------

    def _crash_driver(self) -> None:
        """The driver dies at its next event, and another one resumes after a while."""
        if self.cluster.driver.up:
            away = self.random.choice([0.0, 0.1, self.random.uniform(0.0, 3.0), 10.0])
            self.cluster.driver.die_soon(self.random.choice(MOMENTS), away)

    def _cut_from_etcd(self) -> None:
        """The driver cannot write its journal; it may, after a while, or a standby takes over."""
        driver = self.cluster.driver
        if driver.up and driver.dies is None and driver.waits is None:
            seconds = self.random.choice([0.1, self.random.uniform(0.0, 3.0), 5.0])
            driver.cut = Cut(seconds, self.random.random() < 0.5)

    def driver_is_back(self) -> None:
        """The next driver asks for the hosts, and watches leases from now on."""
        clock, random = self.cluster.clock, self.cluster.driver.random
        clock.after(random.uniform(0.0, 0.5), self.discover)
        for worker in self.cluster.living():
            if worker.id not in self.cluster.leases:
                worker.frozen = worker.beats = False  # nobody would miss it
            elif worker.frozen and not worker.beats:
                clock.after(HEARTBEAT_S / 2, partial(self._falls_silent, worker))
                clock.after(HEARTBEAT_S, partial(self._lease_expires, worker))

    # ---- workers ---------------------------------------------------------------------

    def _pick(self) -> SimWorker | None:
        living = self.cluster.living()
        return self.random.choice(living) if living else None

    def _kill(self) -> None:
        worker = self._pick()
        if worker is not None:
            worker.end(-9)

    def _exit(self) -> None:
        worker = self._pick()
        if worker is not None and not worker.frozen:
            worker.end(3)

    def _run_out(self) -> None:
        """The kernel kills a worker that has taken more memory than there was.

        Most hosts have room for more, some for none.
        """
        worker, random = self._pick(), self._memory
        if worker is None:
            return
        idle = {host: random.choice([0, 10, 10]) * GIB for host in self.hosts}
        self.cluster.deliver(seen.HostsMeasured(tuple(idle.items())))
        found = ev.OutOfMemory(random.choice([None, GIB, 2 * GIB]), random.choice([0, 10]) * GIB)
        worker.end(-9, short=found)

    def _freeze(self) -> None:
        worker = self._pick()
        if worker is None or worker.frozen or not self.cluster.elastic:
            return
        if worker.ready or worker.group is not None:  # it has a lease to lose
            worker.frozen = True
            self.cluster.clock.after(HEARTBEAT_S / 2, lambda: self._falls_silent(worker))
            self.cluster.clock.after(HEARTBEAT_S, lambda: self._lease_expires(worker))

    def _falls_silent(self, worker: SimWorker) -> None:
        if worker.alive and worker.frozen:
            self.cluster.deliver(seen.LeaseExpired("half", worker.id, HEARTBEAT_S))

    def _lease_expires(self, worker: SimWorker) -> None:
        if worker.alive and worker.frozen:
            self.cluster.deliver(seen.LeaseExpired("worker", worker.id, HEARTBEAT_S))

    def _notice(self) -> None:
        """Workers are told that they have to go, and see to it themselves when time is up."""
        told = [w for w in self.cluster.living() if w.group is not None and not w.frozen]
        if not self.cluster.elastic or not told:
            return
        chosen = [self.random.choice(told)] if self.random.random() < 0.8 else told
        deadline = self.random.choice([0.5, 3.0, 10.0])
        for worker in chosen:
            leaving = ev.WorkerLeaving(worker.id, deadline, "it got SIGTERM")
            self.cluster.post(worker.agent, leaving)
            self.cluster.clock.after(deadline, partial(worker.end, -15))

    def _deadlock(self) -> None:
        """One training thread stops while its heartbeat goes on."""
        worker = self._pick()
        if worker is None or worker.frozen or worker.group is None or not self.cluster.elastic:
            return
        worker.frozen = worker.beats = True
        self._tell_stalls(worker.group, {worker.id})

    def _mismatch(self) -> None:
        """All wait in collectives that do not match, until told to leave.

        Some may just be joining: they wait too, and say so as late as they have come.
        """
        worker = self._pick()
        if worker is None or worker.group is None or not self.cluster.elastic:
            return
        worker.group.stuck = True
        self._tell_stalls(worker.group, set())

    def _tell_stalls(self, group: Group, elsewhere: set[str]) -> None:
        """Members still in this round after a while say where they stand, each in its time."""
        heard: set[str] = set()

        def tell(worker: SimWorker, seconds: float) -> None:
            still_in = worker.alive and worker.group is group and not worker.agent.cut
            if not still_in or not group.stands_still():
                return
            if worker.frozen > worker.beats:  # it says so when it wakes, if it is not lost before
                self.cluster.clock.after(HANG_S, partial(tell, worker, seconds))
                return
            where: Literal["collective", "elsewhere"] = (
                "elsewhere" if worker.id in elsewhere else "collective"
            )
            first = 0.0 if seconds == HANG_S else HANG_S
            stalled = ev.WorkerStalled(worker.id, group.round, seconds, where, "a stack", first)
            self.cluster.post(worker.agent, stalled)
            self.cluster.clock.after(seconds, partial(tell, worker, 2 * seconds))

        def listen() -> None:
            for worker in list(group.members.values()):
                if worker.id not in heard:
                    heard.add(worker.id)
                    delay = HANG_S + worker.soon(0.0, 0.2)
                    self.cluster.clock.after(delay, partial(tell, worker, HANG_S))
            if len(heard) < group.size and group.stands_still() and not group.broken:
                self.cluster.clock.after(HANG_S, listen)

        listen()

    def _thaw(self) -> None:
        for worker in self.cluster.living():
            worker.frozen = worker.beats = False

    def _slow(self) -> None:
        """A member is found slow, or one that was known to be is so no longer."""
        rounds = self.cluster.job.rounds
        round_, slow = rounds.current, self.cluster.job.drains.slow
        if slow and self.random.random() < 0.3:
            worker_id = self.random.choice(list(slow))
            self.cluster.deliver(seen.RankRecovered(worker_id, round_.number))
        elif round_.members:
            worker_id = self.random.choice(round_.members)
            self.cluster.deliver(seen.RankSlow(worker_id, round_.number, 2.5))

    # ---- agents and hosts ------------------------------------------------------------

    def _kill_agent(self) -> None:
        agents = [a for a in self.cluster.agents.values() if a.alive]
        if not agents:
            return
        agent = self.random.choice(agents)
        agent.die()
        lost = seen.AgentLost(agent.host, agent.incarnation, "the agent exited")
        delay = self.random.choice([0.01, HEARTBEAT_S])
        if delay == HEARTBEAT_S:  # nobody tells of its end, but its connections close
            self._suspect(agent, self.random.choice(["disconnected", "backend"]))
        self.cluster.clock.after(delay, lambda: self.cluster.deliver(lost))

    def _cut_host(self) -> None:
        agents = [a for a in self.cluster.agents.values() if a.alive and not a.cut]
        if not agents:
            return
        agent = self.random.choice(agents)
        agent.cut = True
        owner = f"{agent.host}.{agent.incarnation}"
        lost = seen.LeaseExpired("agent", owner, HEARTBEAT_S)

        def expire() -> None:
            agent.die()
            self.cluster.deliver(lost)

        self.cluster.clock.after(SILENT_S, lambda: self._suspect(agent, "silent"))
        self.cluster.clock.after(HEARTBEAT_S, expire)

    def _hiccup(self) -> None:
        """An agent is late, or a connection of it breaks, never both; and it is heard again."""
        suspects = self.cluster.job.suspicion.suspects
        agents = [
            a
            for a in self.cluster.agents.values()
            if a.alive and not a.cut and a.host not in suspects
        ]
        if not agents:
            return
        agent = self.random.choice(agents)
        self._suspect(agent, self.random.choice(["silent", "disconnected", "backend"]))
        heard = seen.AgentHeard(agent.host, agent.incarnation)

        def hear() -> None:
            mute = agent.parted is not None and agent.parted.mute
            if agent.alive and not agent.cut and not mute:
                self.cluster.deliver(heard)

        self.cluster.clock.after(self.random.uniform(0.01, 3.0), hear)

    def _suspect(self, agent: SimAgent, evidence: seen.Evidence) -> None:
        found = seen.AgentSuspected(agent.host, agent.incarnation, evidence, f"it is {evidence}")
        self.cluster.deliver(found)

    def _power_off(self) -> None:
        """A host loses its power; after a while, or at the end, it is back."""
        host = self.random.choice([*self.hosts, "none"])
        self.cluster.dark.add(host)
        agent = self.cluster.agents.get(host)
        if agent is not None and agent.alive:
            agent.cut = True
            agent.die()
            lost = seen.LeaseExpired("agent", f"{host}.{agent.incarnation}", HEARTBEAT_S)
            self.cluster.clock.after(HEARTBEAT_S, lambda: self.cluster.deliver(lost))
        away = self.random.choice([0.5, 3.0, 20.0])
        self.cluster.clock.after(away, lambda: self.cluster.dark.discard(host))

    def _remove_host(self) -> None:
        if len(self.hosts) > 1 or self.random.random() < 0.2:
            self._take(self.random.choice(list(self.hosts or {"none": 0})))

    def _take(self, host: str) -> None:
        if host in self.hosts:
            self.gone[host] = self.hosts.pop(host)
            self.discover()

    def _return_host(self) -> None:
        if self.gone:
            host = self.random.choice(list(self.gone))
            self.hosts[host] = self.gone.pop(host)
            self.discover()

    def _flap(self) -> None:
        if self.hosts:
            self._take(self.random.choice(list(self.hosts)))
            self.cluster.clock.after(self.random.uniform(0.0, 0.2), self._return_host)

    def _resize(self) -> None:
        if self.hosts:
            host = self.random.choice(list(self.hosts))
            self.hosts[host] = self.random.randint(1, 4)
            self.discover()

    def _add_host(self) -> None:
        name = f"h{len(self.all_hosts)}"
        if len(self.all_hosts) < 6:
            self.hosts[name] = self.all_hosts[name] = self.random.randint(1, 3)
            self.discover()

    def _exchange_hosts(self) -> None:
        """All hosts go, others come: the state has to be handed over."""
        if self.gone:
            self.hosts, self.gone = self.gone, self.hosts
            self.discover()

    def _scale(self) -> None:
        self.cluster.deliver(ev.ScaleRequested(self.random.randint(1, 8)))

    def _drain(self) -> None:
        """By hand, or by the agent that was told of its host's end and then ends with it."""
        host = self.random.choice([*self.hosts, "none"])
        deadline = self.random.choice([None, 0.0, 1.0, 10.0])
        agent = self.cluster.agents.get(host)
        if agent is None or not agent.alive or deadline is None:
            self.cluster.deliver(ev.DrainRequested(host, "maintenance", deadline))
        else:
            self._tell_host(host, deadline)

    def _tell_host(self, host: str, deadline: float) -> None:
        agent = self.cluster.agents[host]
        notice = ev.HostLeaving(host, agent.incarnation, deadline, "got SIGTERM")
        self.cluster.post(agent, notice)

        def end() -> None:
            if agent.alive:
                agent.die()
                lost = seen.AgentLost(host, agent.incarnation, "the agent exited")
                self.cluster.deliver(lost)

        self.cluster.clock.after(deadline, end)

    def _undrain(self) -> None:
        self._let_back(self.random.choice([*self.hosts, "none"]))

    def _let_back(self, host: str) -> None:
        self.cluster.deliver(ev.DrainCancelled(host, "it may be used again"))

    def _discovery_fails(self) -> None:
        self.cluster.deliver(seen.DiscoveryFailed("script exited 1"))
