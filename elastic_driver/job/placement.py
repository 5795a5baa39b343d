"""Slots that get workers, hosts that get agents, workers that have to leave, and spares.

`Placement` works when hosts, slots, agents or the wanted size have changed. A host in cool-down
gets nothing new; a worker that has to leave is stopped by `membership` or `plain`.

A spare (`--spares N`) is a worker that has run the script up to `@elastic.run` and waits. It is in
no slot and in no round. When a slot comes free on its host, a spare that is ready gets it and is a
member of the next round, so that the job is back at full size at the survivors' next step. The next
spare is started when that round has finished a step and no worker is booting, because its start
takes a core from the training. A spare whose process uses the device of the slot it was started for
can only take that slot. The end of a spare is no failure of the job. The next one is started after
a pause that doubles. If `MAX_EARLY` in a row end before they are ready, the host gets no more,
unless one that it still has is promoted. Times are monotonic seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from elastic_driver.job import units
from elastic_driver.job.decisions import PublishPlace, StartAgent, StopAgent
from elastic_driver.job.events import takes
from elastic_driver.job.fleet import AgentNews, HostAgent
from elastic_driver.job.hosts import Host
from elastic_driver.job.leaving import Drains
from elastic_driver.job.outcome import ScriptKind
from elastic_driver.job.ranks import assign
from elastic_driver.job.rounds import COMPLETE, FORMING, Rule
from elastic_driver.job.workers import (
    ACTIVE,
    ENDING,
    RUNNING,
    SPARE,
    SPARES,
    STARTING,
    STOPPING,
    WARMING,
    Worker,
)
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import StartWorkerOrder
from elastic_driver.words.tf_config import PortOffer, TfLayout, Where
from elastic_driver.words.world import SlotInfo


@dataclass(slots=True)
class Placement(Rule):
    """Marks workers that have to leave; starts and stops agents, and starts workers."""

    drains: Drains
    tf: TfLayout | None
    some_leave: bool = saved(False)  # whether any worker may be marked as leaving

    @property
    def unsettled(self) -> bool:
        """Return whether a change makes the marks of leaving workers stale."""
        return self.capacity.changed and self.outcome.first_success is None

    def advance(self, now: float) -> Iterable[Wait]:
        """Mark the workers that have to leave; stop and start agents."""
        if not self.unsettled:
            return ()
        self.capacity.mark_settled(placing=not self.outcome.finishing)
        self._mark_leavers()
        if not self.outcome.finishing:
            self._release_hosts()
            self._start_agents(now)
            self._start_standbys(now)
        return ()

    # ---- workers that have to leave ----------------------------------------------------------

    def _mark_leavers(self) -> None:
        """Record for every worker whether, and why, it has to leave; the oldest are kept."""
        kept: list[Worker] = []
        on_host = Counter[str]()
        wanted = self.capacity.wanted
        for worker in sorted(self.workers.having(*ACTIVE), key=lambda worker: worker.age):
            reason = self._why_leave(worker, on_host[worker.host])
            self.workers.mark_leaving(worker, reason)
            if not reason:
                on_host[worker.host] += 1
                kept.append(worker)
        if wanted is not None:
            shares = units.shares(kept, self.settings)
            fitting = shares[:wanted]
            only = f"only {counted(wanted, 'worker is', 'workers are')} wanted"
            for worker in shares[wanted:]:
                self.workers.mark_leaving(worker, only)
            more = "more hosts are needed, and one of them gets its place"
            for worker in fitting[max(0, len(fitting) - self._hosts_to_come(fitting, wanted)) :]:
                self.workers.mark_leaving(worker, more)
        self.some_leave = any(worker.leaving for worker in self.workers.having(*ACTIVE))

    def _why_leave(self, worker: Worker, older: int) -> str:
        """Return why a worker has to leave; `older` ones of its host stay."""
        host = self.hosts.known.get(worker.host)
        if self.ending.departure is not None:
            return self.ending.departure.reason
        if host is None:
            return f"host {worker.host} was removed"
        if self.hosts.is_left(host) and worker.state is not ENDING:
            return f"a worker of host {host.name} has failed"
        too_many = f"host {host.name} has only {counted(host.slots, 'slot')} now"
        return self.drains.reason_for(worker) or (too_many if older >= host.slots else "")

    def _hosts_to_come(self, kept: list[Worker], wanted: int) -> int:
        """Return how many usable hosts without workers a world still needs."""
        width = units.width(self.settings)
        inside = {worker.host for worker in kept}
        if width == 1:
            return 0
        others = sum(self.hosts.is_usable(name) for name in self.hosts.known if name not in inside)
        missing = min(others, width - len(inside))
        return max(0, missing - max(0, wanted - len(kept)))

    # ---- agents ------------------------------------------------------------------------------

    def _start_agents(self, now: float) -> None:
        """Start agents on further hosts as long as their slots are needed."""
        room = self.room_left()
        distrusted = self.hosts.distrusted
        need = float("inf") if room is None else room
        without: list[str] = []
        relied_on = spare = 0  # hosts; slots of slow hosts, which are the last choice
        for host in sorted(self.hosts.known.values(), key=self.hosts.preference):
            name = host.name
            agent = self.fleet.agents.get(host.name)
            if not self._eligible(name):
                continue
            if agent is None:
                without.append(name)
            elif name in distrusted:
                spare += self._room(host)
                relied_on += bool(self.workers.on_host(name))
            elif agent.is_up or not self.hosts.is_suspect(name, now):
                need -= self._room(host)
                relied_on += 1
        for name in without:
            if name in distrusted:
                need, spare = need - spare, 0
            if not units.one_more(relied_on, self.settings, slots_needed=need > 0):
                return
            self.start_agent(name, now, "its slots are needed")
            if not self.hosts.is_suspect(name, now):
                need -= self._room(self.hosts.known[name])
                relied_on += 1

    def _start_standbys(self, now: float) -> None:
        """Start agents on idle hosts with slots enough to replace the largest host in use.

        Their warm parents have done the imports when a host is lost. They are started once the
        job trains: the start of the job does not wait for them.
        """
        current, largest = self.rounds.current, 0
        trains = current.stepped if self.outcome.elastic else self.outcome.kind is ScriptKind.PLAIN
        if current.state is not COMPLETE or not trains or self.room_left() != 0:
            return
        idle = 0
        without = list[Host]()
        for host in sorted(self.hosts.known.values(), key=self.hosts.preference):
            working = self.workers.on_host(host.name)
            agent = self.fleet.agents.get(host.name)
            largest = max(largest, len(self.workers.in_slots(host.name)))
            if working or not self._eligible(host.name) or host.name in self.hosts.distrusted:
                continue
            if agent is None:
                without.append(host)
            else:
                idle += host.slots
        for host in without:
            if idle >= largest:
                return
            self.start_agent(host.name, now, "it stands by to replace a host that is lost")
            idle += host.slots

    def _eligible(self, host: str) -> bool:
        """Return whether the host may get workers now; during a replacement only its target may."""
        ongoing = self.drains.replacement
        replacement = None if ongoing is None else ongoing.target
        fits = host not in self.capacity.unfit
        return self.hosts.is_usable(host) and fits and replacement in (None, host)

    def _release_hosts(self) -> None:
        """Stop the agents of hosts that go away, once they have no workers."""
        for host, agent in list(self.fleet.agents.items()):
            drain = self.hosts.drain_of(host)
            if self.workers.on_host(host) or (host in self.hosts.known and drain is None):
                continue
            if drain is None:
                self.stop_agent(agent, f"host {host} was removed")
            else:
                self.stop_agent(agent, f"host {host} is drained: {drain.reason}")
                nothing = f"nothing runs there any more: {drain.reason}"
                self.effects.announce(host_log.HostDrained(), nothing, host)

    def _room(self, host: Host) -> int:
        """Return the slots that are free, or will be once the workers that leave are gone."""
        there = self.workers.on_host(host.name)
        staying = sum(worker.state in ACTIVE and not worker.leaving for worker in there)
        return max(0, host.slots - staying)

    def start_agent(self, host: str, now: float, reason: str) -> None:
        """Ask for the host's next agent."""
        agent = self.fleet.ask(host, now)
        slots = self.hosts.known[host].slots
        self.effects.decide(StartAgent(host, agent.incarnation, slots, reason))

    def stop_agent(self, agent: HostAgent, reason: str) -> None:
        """Tell an agent to stop. Its end is not awaited; the next one has another incarnation."""
        self.fleet.apply(agent, AgentNews.RELEASED)
        grace = self.settings.stop_grace
        self.effects.decide(StopAgent(agent.host, agent.incarnation, grace, reason))

    # ---- workers -----------------------------------------------------------------------------

    def free_slots(self, limit: int | None = None, *, anew: bool = False) -> list[Where]:
        """Return slots that could get a worker now: hosts in stable order, at most `limit` slots.

        Slots that failed last are chosen first, so that a failure is repaired in place; slow hosts
        are chosen last. `anew`: as if no worker were there.
        """
        hosts = {host.name: host for host in self._ready_hosts()}
        there = {name: [] if anew else self.workers.in_slots(name) for name in hosts}
        free: dict[Where, None] = {}
        for name, host in hosts.items():
            taken = {worker.slot for worker in there[name]}
            slots = ((name, slot) for slot in range(host.slots) if slot not in taken)
            free.update(dict.fromkeys(islice(slots, max(0, host.slots - len(taken)))))
        if limit is None or limit >= len(free):
            return list(free)
        refill = (where for where in self.capacity.slots_to_refill if where in free)
        first = dict.fromkeys(w for w in refill if w[0] not in self.hosts.distrusted)
        levels = {name: len(workers) for name, workers in there.items()}
        chosen = islice(self._in_turn({**first, **free}, levels), max(0, limit))
        return sorted(chosen, key=lambda where: (hosts[where[0]].position, where[1]))

    def _in_turn(self, free: dict[Where, None], levels: dict[str, int]) -> Iterable[Where]:
        """Return free slots in the order in which to fill them; `levels`: workers by host.

        Host by host; but if a world needs several hosts, those of a unit in turn, so that the
        first one does not take all workers that are wanted.
        """
        width = units.width(self.settings)
        if width == 1:
            return free
        order = {host: n for n, host in enumerate(levels)}
        keyed: dict[Where, tuple[int, int, int]] = {}
        for where in free:
            host = where[0]
            keyed[where] = (order[host] // width, levels[host], order[host])
            levels[host] += 1
        return sorted(free, key=keyed.__getitem__)

    def founding_slots(self, *, anew: bool = False) -> list[Where]:
        """Return the free slots for a round that is founded on them: hosts in whole units.

        If only some hosts can be in a world, those of the last round come first. `anew`: as if no
        worker were there.
        """
        where = self.free_slots(self.capacity.wanted if anew else self.room_left(), anew=anew)
        used = (w.host for w in self.workers.having(*ACTIVE) if not (anew or w.leaving))
        free = {host for host, _ in where}
        last = (host for host in self.rounds.last_hosts if host in free)
        in_order = dict.fromkeys([*used, *last, *(host for host, _ in where)])
        hosts = units.whole([*in_order], self.settings)
        return [(host, slot) for host, slot in where if host in hosts]

    def grows_anew(self) -> bool:
        """Return whether a round that is founded anew would have more workers than there are.

        It may be on other hosts. So the answer depends on the hosts, and not on the order in which
        their agents came up.
        """
        if self.room_left() == 0 or not self.free_slots(1):
            return False
        return len(self.founding_slots(anew=True)) > self.workers.active()

    def _ready_hosts(self) -> list[Host]:
        """Return hosts that may get workers now, slow ones last; reads only hosts with agents."""
        known, slow = self.hosts.known, self.hosts.distrusted
        names = [n for n in self.fleet.agents if self.fleet.is_ready(n) and self._eligible(n)]
        coming = any(agent.host not in slow for agent in self.fleet.starting.values())
        if coming and self.workers.active() >= self.capacity.least:  # slow hosts can wait
            names = [name for name in names if name not in slow]
        return sorted((known[name] for name in names), key=self.hosts.preference)

    def room_left(self) -> int | None:
        """Return how many more workers are wanted; None: any number."""
        wanted = self.capacity.wanted
        return None if wanted is None else max(0, wanted - self.workers.active())

    def place(self, slots: list[Where], why: str, *, founder: bool, awaited: bool) -> list[Worker]:
        """Start workers in these slots, all of them free; return the workers."""
        self.capacity.mark_placed()
        if not slots:
            return []
        staying = [worker for worker in self.workers.having(*ACTIVE) if not worker.leaving]
        started = [self.workers.add(*slot, founder=founder, awaited=awaited) for slot in slots]
        seats = [w.expected_seat if self.outcome.elastic else w.seat for w in staying]
        seats += [worker.seat for worker in started]
        places = dict(assign(seats))
        self._tell(staying, places)
        tf_configs = self._tf_configs([(seat.host, seat.slot) for seat in seats])
        rank0 = next(iter(places.values())).host
        for worker in started:
            tf_config = tf_configs.get((worker.host, worker.slot))
            self.start(worker, places[worker.id], rank0, why, tf_config)
        return started

    def tell_places(self) -> None:
        """Tell workers that boot the places that they are to have now, where these are others."""
        if self.workers.count(STARTING):
            staying = [worker for worker in self.workers.having(*ACTIVE) if not worker.leaving]
            self._tell(staying, dict(assign(worker.expected_seat for worker in staying)))

    def _tell(self, workers: list[Worker], places: dict[str, SlotInfo]) -> None:
        for worker in workers:
            place = places[worker.id]
            if self.outcome.elastic and worker.state is STARTING and place != worker.place:
                self.workers.expect(worker, place)
                self.effects.decide(PublishPlace(worker.id, place, "others come or go"))

    def start(
        self, worker: Worker, place: SlotInfo, rank0: str, why: str, tf_config: str | None = None
    ) -> None:
        """Order a worker's process, for a round whose rank 0 is on the host `rank0`."""
        current, restarts = self.rounds.current, self.outcome.restart_count
        number = current.number if current.state is FORMING else current.number + 1
        agent = self.fleet.agents[rank0]
        meeting = agent.address, agent.port(number)
        elastic = self.outcome.elastic
        known = self.hosts.known.get(worker.host)
        slots = 0 if known is None else known.slots
        order = StartWorkerOrder(
            worker.id, place, number, restarts, *meeting, tf_config, elastic, slots
        )
        self.workers.record_order(worker, order)
        self.effects.give(worker.host, order, why)

    def _tf_configs(self, members: list[Where]) -> dict[Where, str]:
        """Return TF_CONFIG of each member of the coming world; empty if the job has none."""
        if self.tf is None:
            return {}
        agents = ((where, self.fleet.agents[where[0]]) for where in members)
        return self.tf.settle({where: PortOffer(a.address, a.slot_ports) for where, a in agents})


# ---- spares ------------------------------------------------------------------------------

MAX_EARLY = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class SpareFailures:
    """The failures of one host's spares."""

    early: int = 0  # in a row, before they were ready
    pause: float = 0.0  # before the next start
    until: float = 0.0  # the end of that pause


@dataclass(slots=True)
class Spares(Rule):
    """Keeps spares on the hosts of an elastic job, and gives them the slots that come free."""

    placement: Placement
    _failures: dict[str, SpareFailures] = saved(factory=dict, name="failures")  # by host
    _filled: int = saved(0, name="filled")  # the round in which missing spares were started
    _retry_at: float | None = saved(None, name="retry_at")  # the end of the first pause
    _told: bool = saved(False, name="told")  # that the script cannot have spares

    def has_failed(self, host: str) -> bool:
        """Return whether a spare of this host has ended since the last one was promoted."""
        return host in self._failures

    # ---- reports -------------------------------------------------------------------------

    @takes(ev.WorkerReady, spare=True)
    def on_ready(self, worker: Worker, event: ev.WorkerReady, now: float) -> None:
        """Record that a spare waits for a slot."""
        self.workers.record_ready(worker, event)
        failures = self._failures.get(worker.host)
        if failures is not None and failures.early < MAX_EARLY:  # otherwise no more are started
            failures.early = 0
        self.effects.announce(worker_log.SpareReady(), "it waits for a free slot", worker)

    @takes(ev.WorkerExited, spare=True)
    def on_exited(self, worker: Worker, event: ev.WorkerExited, now: float) -> None:
        """Record the end of a spare, which is a failure of neither the job nor the host."""
        code, told, early = event.exit_code, worker.state is STOPPING, worker.state is WARMING
        self.workers.record_end(worker, code, as_told=told)
        self.capacity.note_change()
        reason = f"exit code {code}, a spare that was told to stop"
        if not told:
            host = self._failures.setdefault(worker.host, SpareFailures())
            host.early = host.early + 1 if early else 0
            host.pause = min(max(FIRST_PAUSE_S, 2 * host.pause), LONGEST_PAUSE_S)
            host.until = now + host.pause
            after = f"the next one is started in {host.pause:g} s"
            if host.early >= MAX_EARLY:
                after = f"{MAX_EARLY} ended before they were ready: {worker.host} gets no more"
            reason = f"exit code {code}, a spare; {after}"
        self.effects.announce(
            worker_log.WorkerExited(exit_code=code, expected=told), reason, worker
        )

    # ---- slots ---------------------------------------------------------------------------

    def promote(self, slots: list[Where], *, founder: bool) -> list[Where]:
        """Give these free slots to spares that are ready; return the slots that are left."""
        ready = list(self.workers.having(SPARE))
        left: list[Where] = []
        for host, slot in slots:
            fit = (w for w in ready if w.host == host and (w.slot == slot or not w.bound))
            spare = min(fit, key=lambda worker: worker.slot != slot, default=None)
            if spare is None:
                left.append((host, slot))
                continue
            ready.remove(spare)
            self.workers.promote(spare, slot, founder=founder)
            self._failures.pop(host, None)
            self.effects.announce(worker_log.SparePromoted(), f"it takes slot {slot}", spare)
        return left

    # ---- starting and stopping -----------------------------------------------------------

    def advance(self, now: float) -> Iterable[Wait]:
        """Stop spares that are of no use any more; start those that are missing."""
        if not self.settings.spares:
            return
        if not self.outcome.elastic or self.placement.tf is not None:
            self._tell_without()
        elif self.outcome.finishing:
            for worker in self.workers.having(*SPARES):
                self.effects.stop(worker, "the job is finishing")
        else:
            yield from self._keep(now)

    def _tell_without(self) -> None:
        if self.outcome.kind is not ScriptKind.UNDECLARED and not self._told:
            self._told = True
            why = "--spares is for scripts that use @elastic.run or elastic.init(), on torch"
            self.effects.announce(worker_log.SparesUnused(), why)

    def _keep(self, now: float) -> Iterator[Wait]:
        current = self.rounds.current
        trains = current.state is COMPLETE and current.stepped
        over = False
        if self._retry_at is not None and trains:
            pause = Wait(self._retry_at)
            over = pause.is_over(now)
            if not over:
                yield pause
        if self.capacity.spares_due:
            self._stop_surplus()
            self._filled = 0  # a host may need new ones in this round, when no worker boots
        elif not over and (not trains or self._filled == current.number):
            return
        self.capacity.mark_spares_settled()
        if trains and not self.workers.count(STARTING):
            self._filled, self._retry_at = current.number, None
            yield from self._start_missing(now)

    def _stop_surplus(self) -> None:
        """Stop the spares of hosts that cannot be used, or have no worker that stays."""
        for worker in self.workers.having(*SPARES):
            host = worker.host
            there = self.workers.in_slots(worker.host)
            if not self.hosts.is_usable(host):
                self.effects.stop(worker, f"host {host} gets no new workers")
            elif not any(w.state in ACTIVE and not w.leaving for w in there):
                self.effects.stop(worker, f"host {host} has no workers")

    def _start_missing(self, now: float) -> Iterator[Wait]:
        members = list(self.workers.having(RUNNING))
        have = Counter(worker.host for worker in self.workers.having(*SPARES))
        by_host: dict[str, list[Worker]] = {}
        for worker in members:
            if not worker.leaving:
                by_host.setdefault(worker.host, []).append(worker)
        for host, there in by_host.items():
            missing = self.settings.spares - have[host]
            if missing <= 0 or not (self.fleet.is_ready(host) and self.hosts.is_usable(host)):
                continue
            failures = self._failures.get(host, SpareFailures())
            if failures.early >= MAX_EARLY:
                continue
            if now < failures.until:
                yield Wait(failures.until)
                ends = (at for at in (self._retry_at, failures.until) if at is not None)
                self._retry_at = min(ends)
                continue
            for _ in range(missing):
                self._start(host, there, members)

    def _start(self, host: str, there: list[Worker], members: list[Worker]) -> None:
        """Start a spare for the lowest slot that has the fewest, with the variables of its member.

        `there`: the members of this host.
        """
        covered = Counter(w.slot for w in self.workers.on_host(host) if w.spare)
        slot = min(range(self.hosts.known[host].slots), key=lambda slot: covered[slot])
        model = next((worker for worker in there if worker.slot == slot), there[0])
        spare = self.workers.add_spare(host, slot)
        rank0 = min(members, key=lambda worker: worker.place.rank).host
        place = replace(model.place, slot=slot)
        self.placement.start(spare, place, rank0, "a spare for a worker that is lost")
