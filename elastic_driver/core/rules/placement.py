"""Slots that get workers, hosts that get agents, and workers that have to leave.

Works when hosts, slots, agents or the wanted size have changed. A host in cool-down gets nothing
new; a worker that has to leave is stopped by `membership` or `plain`. Times are monotonic seconds.
"""

from dataclasses import dataclass
from itertools import islice

from elastic_driver.contract import worker_id
from elastic_driver.core.decisions import StartAgent, StopAgent
from elastic_driver.core.documents import SlotInfo, StartWorkerOrder
from elastic_driver.core.rules import units
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.drain import Drains
from elastic_driver.core.rules.fleet import FALLBACK_PORT, AgentNews, AgentState, HostAgent
from elastic_driver.core.rules.hosts import Host
from elastic_driver.core.rules.ranks import Seat, assign
from elastic_driver.core.rules.rounds import FORMING
from elastic_driver.core.rules.workers import ACTIVE, Worker
from elastic_driver.core.tf_config import PortOffer, TfLayout, Where


@dataclass(slots=True)
class Founders:
    """The workers that a round was founded with."""

    workers: tuple[str, ...] = ()  # by their rank at birth
    at: float | None = None  # when that was decided
    need: int = 0  # the number of workers it settled for then


@dataclass(slots=True)
class Placement(Rule):
    """Marks workers that have to leave; starts and stops agents, and starts workers."""

    drains: Drains
    tf: TfLayout | None
    some_leave: bool = False  # whether any worker may be marked as leaving

    @property
    def founders(self) -> Founders:
        """The workers that the present round was founded with."""
        return self.rounds.own(Founders)

    @property
    def unsettled(self) -> bool:
        """Return whether a change makes the marks of leaving workers stale."""
        return self.capacity.changed and self.outcome.first_success is None

    def advance(self, now: float) -> None:
        """Mark the workers that have to leave; stop and start agents."""
        if not self.unsettled:
            return
        self.capacity.look_taken(placing=not self.outcome.finishing)
        self._mark_leavers()
        if not self.outcome.finishing:
            self._plan_agents(now)

    # ---- who has to leave --------------------------------------------------------------------

    def _mark_leavers(self) -> None:
        """Note for every worker whether, and why, it has to leave; the oldest are kept."""
        kept: list[Worker] = []
        on_host: dict[str, int] = {}
        departure, wanted = self.outcome.departure, self.capacity.wanted
        for worker in sorted(self.workers.having(*ACTIVE), key=lambda worker: worker.age):
            slots = self.hosts.slots(worker.host)
            taken = on_host.get(worker.host, 0)
            if departure is not None:
                reason = departure.reason
            elif slots == 0:
                reason = f"host {worker.host} was removed"
            else:
                reason = self.drains.reason_for(worker)
                if not reason and taken >= slots:
                    reason = f"host {worker.host} has only {slots} slots now"
            self.workers.mark_leaving(worker, reason)
            if not reason:
                on_host[worker.host] = taken + 1
                kept.append(worker)
        if wanted is not None:
            shares = units.shares(kept, self.settings)
            fitting = shares[:wanted]
            for worker in shares[wanted:]:
                self.workers.mark_leaving(worker, f"only {wanted} workers are wanted")
            for worker in fitting[max(0, len(fitting) - self._hosts_to_come(fitting)) :]:
                more = "more hosts are needed, and one of them gets its place"
                self.workers.mark_leaving(worker, more)
        self.some_leave = any(worker.leaving for worker in self.workers.having(*ACTIVE))

    def _hosts_to_come(self, kept: list[Worker]) -> int:
        """Hosts that are missing in any world, and are there, but find no worker left for them."""
        if units.width(self.settings) == 1 or self.capacity.wanted is None:
            return 0
        inside = {worker.host for worker in kept}
        outside = (host.name for host in self.hosts.known.values() if host.name not in inside)
        others = sum(1 for name in outside if self.hosts.usable(name))
        missing = min(others, units.width(self.settings) - len(inside))
        return max(0, missing - max(0, self.capacity.wanted - len(kept)))

    # ---- agents ------------------------------------------------------------------------------

    def _plan_agents(self, now: float) -> None:
        """Stop agents of hosts that go once empty; start agents where more slots are needed."""
        self._release_hosts()
        wanted = self.capacity.wanted
        need = float("inf") if wanted is None else wanted - self.workers.active()
        without: list[str] = []
        relied_on = spare = 0  # hosts; slots of slow hosts, which are the last choice
        for known in sorted(self.hosts.known.values(), key=self.hosts.preference):
            name = known.name
            if not self._eligible(name):
                continue
            agent = self.fleet.agents.get(name)
            if agent is None:
                without.append(name)
            elif name in self.hosts.distrusted:
                spare += self._room(name)
                relied_on += bool(self.workers.on_host(name))
            elif agent.state is AgentState.READY or not self.hosts.suspect(name, now):
                need -= self._room(name)
                relied_on += 1
        for name in without:
            if name in self.hosts.distrusted:
                need, spare = need - spare, 0
            if not self._more_hosts(need, relied_on):
                return
            self.start_agent(name, now, "its slots are needed")
            if not self.hosts.suspect(name, now):
                need -= self._room(name)
                relied_on += 1

    def _more_hosts(self, need: float, hosts: int) -> bool:
        """Return whether one more host is needed, for its slots or to make up a unit."""
        settings = self.settings
        if settings.max_hosts is not None and hosts >= settings.max_hosts:
            return False
        return need > 0 or not units.enough(hosts, settings)

    def _eligible(self, host: str) -> bool:
        """Return whether the host may get workers now; during a replacement only its target may."""
        replacement = self.drains.replacement
        return self.hosts.usable(host) and (replacement is None or host == replacement.target)

    def _release_hosts(self) -> None:
        for host, agent in list(self.fleet.agents.items()):
            drain = self.hosts.drained(host)
            if self.workers.on_host(host) or (host in self.hosts.known and drain is None):
                continue
            if drain is None:
                self.stop_agent(agent, f"host {host} was removed")
            else:
                self.stop_agent(agent, f"host {host} is drained: {drain.reason}")
                nothing = f"nothing runs there any more: {drain.reason}"
                self.effects.announce("host_drained", nothing, host=host)

    def _room(self, host: str) -> int:
        """Slots that are free, or will be once those who leave are gone."""
        staying = sum(1 for w in self.workers.on_host(host) if w.state in ACTIVE and not w.leaving)
        return max(0, self.hosts.slots(host) - staying)

    def start_agent(self, host: str, now: float, reason: str) -> None:
        """Ask for the host's next agent."""
        agent = self.fleet.ask(host, now)
        self.effects.decide(StartAgent(host, agent.incarnation, self.hosts.slots(host), reason))

    def stop_agent(self, agent: HostAgent, reason: str) -> None:
        """Let an agent go. Its end is not awaited; the next one has another incarnation."""
        self.fleet.apply(agent, AgentNews.RELEASED)
        grace = self.settings.stop_grace
        self.effects.decide(StopAgent(agent.host, agent.incarnation, grace, reason))

    # ---- workers -----------------------------------------------------------------------------

    def free_slots(self, limit: int | None = None) -> list[tuple[str, int]]:
        """(host, slot) that could get a worker now: hosts in stable order, at most `limit`.

        Slots that failed last are chosen first, so that a failure is repaired in place; slow hosts
        are chosen last.
        """
        hosts = {host.name: host for host in self._ready_hosts()}
        free: dict[tuple[str, int], None] = {}
        for host in hosts.values():
            taken = {worker.slot for worker in self.workers.on_host(host.name)}
            slots = (slot for slot in range(host.slots) if slot not in taken)
            room = max(0, host.slots - len(taken))
            free.update(dict.fromkeys((host.name, slot) for slot in islice(slots, room)))
        if limit is None or limit >= len(free):
            return list(free)
        refill = (where for where in self.capacity.slots_to_refill if where in free)
        first = dict.fromkeys(where for where in refill if where[0] not in self.hosts.distrusted)
        chosen = islice(self._in_turn({**first, **free}), max(0, limit))
        return sorted(chosen, key=lambda where: (hosts[where[0]].position, where[1]))

    def _in_turn(self, free: dict[tuple[str, int], None]) -> dict[tuple[str, int], None]:
        """Free slots in the order in which to fill them.

        Host by host; but where a world needs several hosts, those of a unit in turn, so that the
        first one does not take all workers that are wanted.
        """
        width = units.width(self.settings)
        if width == 1:
            return free
        order = {host.name: n for n, host in enumerate(self._ready_hosts())}
        levels = {host: len(self.workers.on_host(host)) for host in order}
        keyed: dict[tuple[str, int], tuple[int, int, int]] = {}
        for where in free:
            host = where[0]
            keyed[where] = (order[host] // width, levels[host], order[host])
            levels[host] += 1
        return dict.fromkeys(sorted(free, key=keyed.__getitem__))

    def founding_slots(self) -> list[tuple[str, int]]:
        """The free slots for a round whose size is that of its birth: hosts in whole units."""
        where = self.free_slots(self.room_left())
        used = (w.host for w in self.workers.having(*ACTIVE) if not w.leaving)
        found = dict.fromkeys([*used, *(host for host, _ in where)])
        hosts = units.whole([*found], self.settings)
        return [(host, slot) for host, slot in where if host in hosts]

    def _ready_hosts(self) -> list[Host]:
        """Hosts that may get workers now, slow ones last; only hosts with agents are looked at."""
        named = (
            self.hosts.known.get(name) for name in self.fleet.agents if self.fleet.is_ready(name)
        )
        usable = [host for host in named if host is not None and self._eligible(host.name)]
        coming = any(agent.host not in self.hosts.distrusted for agent in self.fleet.starting())
        if coming and self.workers.active() >= self.settings.min_np:  # slow hosts can wait
            usable = [host for host in usable if host.name not in self.hosts.distrusted]
        return sorted(usable, key=self.hosts.preference)

    def room_left(self) -> int | None:
        """Return how many more workers are wanted; None: any number."""
        wanted = self.capacity.wanted
        return None if wanted is None else max(0, wanted - self.workers.active())

    def found(self, where: list[tuple[str, int]], need: int, now: float, reason: str) -> None:
        """Start the workers that the present round is founded with."""
        started = self.place(where, founders=True, awaited=True, reason=reason)
        by_rank = sorted(started, key=lambda worker: worker.place.rank)
        founders = self.founders
        founders.workers = tuple(worker.id for worker in by_rank)
        founders.at, founders.need = now, min(need, len(started))

    def place(
        self, where: list[tuple[str, int]], *, founders: bool, awaited: bool, reason: str
    ) -> list[Worker]:
        """Start workers in these slots, all of them free; those started."""
        self.capacity.placed()
        if not where:
            return []
        known = [worker for worker in self.workers.having(*ACTIVE) if not worker.leaving]
        seats = [worker.seat for worker in known]
        for index, (host, slot) in enumerate(where):
            name = worker_id(host, slot, self.workers.next_incarnation(host, slot))
            seats.append(Seat(name, host, slot, (True, self.workers.started + 1 + index)))
        places = dict(assign(seats))
        rank0 = next(iter(places.values()))
        tf_configs = self._tf_configs([(seat.host, seat.slot) for seat in seats])
        started = []
        for new in seats[len(known) :]:
            place_ = places[new.worker]
            worker = self.workers.add(new.worker, place_, founder=founders, awaited=awaited)
            tf_config = tf_configs.get((new.host, new.slot))
            self.orders.give(new.host, self._start_order(worker, rank0, tf_config), reason)
            started.append(worker)
        return started

    def _tf_configs(self, members: list[Where]) -> dict[Where, str]:
        """TF_CONFIG of each member of the world to come; empty where the job has none."""
        if self.tf is None:
            return {}
        agents = {host: self.fleet.agents.get(host) for host, _ in members}
        rooms = {
            host: PortOffer(a.address or host, a.slot_ports) for host, a in agents.items() if a
        }
        return self.tf.settle({where: rooms[where[0]] for where in members if where[0] in rooms})

    def _start_order(
        self, worker: Worker, rank0: SlotInfo, tf_config: str | None
    ) -> StartWorkerOrder:
        forming = self.rounds.current.state is FORMING
        round_number = self.rounds.current.number if forming else self.rounds.current.number + 1
        agent = self.fleet.agents.get(rank0.host)
        return StartWorkerOrder(
            worker=worker.id,
            place=worker.place,
            round=round_number,
            restart_count=self.outcome.restart_count,
            master_addr=agent.address if agent and agent.address else rank0.host,
            master_port=agent.port(round_number) if agent else FALLBACK_PORT,
            tf_config=tf_config,
        )
