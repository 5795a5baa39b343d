"""Which slots get workers, which hosts get agents, and which workers have to leave.

Called by the job machine when hosts, slots, agents or the wished size have changed. A host
in cool-down gets nothing new; a worker told to leave is stopped by `elastic` or `plain`.
Times are monotonic seconds.
"""

from __future__ import annotations

from itertools import islice

from elastic_driver.contract import worker_id
from elastic_driver.core.decisions import StartAgent, StopAgent
from elastic_driver.core.documents import SlotInfo, StartWorkerOrder
from elastic_driver.core.rules import units
from elastic_driver.core.rules.fleet import FALLBACK_PORT, Agent, AgentState
from elastic_driver.core.rules.hosts import Host
from elastic_driver.core.rules.ranks import Seat, assign
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import ACTIVE, Worker
from elastic_driver.core.state import JobState, seat
from elastic_driver.core.tf_config import Room, Where

# ---- who has to leave --------------------------------------------------------------------


def mark_leavers(job: JobState) -> None:
    """Note for every worker whether, and why, it has to leave; the oldest are kept."""
    kept: list[Worker] = []
    on_host: dict[str, int] = {}
    for worker in sorted(job.registry.having(*ACTIVE), key=lambda worker: worker.age):
        slots = job.hosts.slots(worker.host)
        taken = on_host.get(worker.host, 0)
        drain = job.hosts.drained(worker.host)
        if job.departure is not None:
            worker.leaving = job.departure.reason
        elif slots == 0:
            worker.leaving = f"host {worker.host} was removed"
        elif drain is not None:
            worker.leaving = f"host {worker.host} is drained: {drain.reason}"
        elif worker.drain is not None:
            worker.leaving = f"{worker.id} has to go: {worker.drain.reason}"
        elif job.replacing is not None and worker.id == job.replacing.worker:
            worker.leaving = f"{worker.id} is replaced: {job.replacing.reason}"
        elif taken >= slots:
            worker.leaving = f"host {worker.host} has only {slots} slots now"
        else:
            worker.leaving = ""
            on_host[worker.host] = taken + 1
            kept.append(worker)
    if job.wanted is not None:
        shares = units.shares(kept, job.settings)
        fitting = shares[: job.wanted]
        for worker in shares[job.wanted :]:
            worker.leaving = f"only {job.wanted} workers are wanted"
        for worker in fitting[max(0, len(fitting) - _hosts_to_come(job, fitting)) :]:
            worker.leaving = "more hosts are needed, and one of them gets its place"
    job.some_leave = any(worker.leaving for worker in job.registry.having(*ACTIVE))


def _hosts_to_come(job: JobState, kept: list[Worker]) -> int:
    """Hosts that are missing in any world, and are there, but find no worker left for them."""
    if units.width(job.settings) == 1 or job.wanted is None:
        return 0
    inside = {worker.host for worker in kept}
    others = sum(1 for h in job.hosts.order if h.name not in inside and job.hosts.usable(h.name))
    missing = min(others, units.width(job.settings) - len(inside))
    return max(0, missing - max(0, job.wanted - len(kept)))


# ---- agents ------------------------------------------------------------------------------


def plan_fleet(job: JobState, now: float) -> None:
    """Stop agents of hosts that go once empty; start agents where more slots are needed."""
    _release_hosts(job)
    need = float("inf") if job.wanted is None else job.wanted - job.registry.active()
    without: list[str] = []
    relied_on = spare = 0  # hosts; slots of slow hosts, which are the last choice
    for known in job.hosts.choice():
        name = known.name
        if not _eligible(job, name):
            continue
        agent = job.fleet.agents.get(name)
        if agent is None:
            without.append(name)
        elif job.hosts.distrusted(name):
            spare += _room(job, name)
            relied_on += bool(job.registry.on_host(name))
        elif agent.state is AgentState.READY or not job.hosts.suspect(name, now):
            need -= _room(job, name)
            relied_on += 1
    for name in without:
        if job.hosts.distrusted(name):
            need, spare = need - spare, 0
        if not _more_hosts(job, need, relied_on):
            return
        start_agent(job, name, now, "its slots are needed")
        if not job.hosts.suspect(name, now):
            need -= _room(job, name)
            relied_on += 1


def _more_hosts(job: JobState, need: float, hosts: int) -> bool:
    """Whether one more host is needed, for its slots or to make up a unit."""
    settings = job.settings
    if settings.max_hosts is not None and hosts >= settings.max_hosts:
        return False
    return need > 0 or not units.enough(hosts, settings)


def _eligible(job: JobState, host: str) -> bool:
    """Whether the host may get workers now; while a worker is replaced, only one host may."""
    if job.replacing is not None and host != job.replacing.target:
        return False
    return job.hosts.usable(host)


def _release_hosts(job: JobState) -> None:
    for host, agent in list(job.fleet.agents.items()):
        drain = job.hosts.drained(host)
        if job.registry.on_host(host) or (host in job.hosts and drain is None):
            continue
        if drain is None:
            stop_agent(job, agent, f"host {host} was removed")
        else:
            stop_agent(job, agent, f"host {host} is drained: {drain.reason}")
            job.announce("host_drained", f"nothing runs there any more: {drain.reason}", host=host)


def _room(job: JobState, host: str) -> int:
    """Slots that are free, or will be once those who leave are gone."""
    staying = sum(1 for w in job.registry.on_host(host) if w.state in ACTIVE and not w.leaving)
    return max(0, job.hosts.slots(host) - staying)


def start_agent(job: JobState, host: str, now: float, reason: str) -> None:
    """Ask for the host's next agent."""
    agent = job.fleet.ask(host, now)
    job.decide(StartAgent(host, agent.incarnation, job.hosts.slots(host), reason))


def stop_agent(job: JobState, agent: Agent, reason: str) -> None:
    """Let an agent go; nobody waits for its end, a next one has another incarnation."""
    job.fleet.drop(agent.host)
    job.decide(StopAgent(agent.host, agent.incarnation, job.settings.stop_grace, reason))


# ---- workers -----------------------------------------------------------------------------


def free_slots(job: JobState, limit: int | None = None) -> list[tuple[str, int]]:
    """(host, slot) that could get a worker now: hosts in stable order, at most `limit`.

    Slots that failed last are chosen first, so that a failure is repaired in place; slow hosts
    are chosen last.
    """
    hosts = {host.name: host for host in _ready_hosts(job)}
    free: dict[tuple[str, int], None] = {}
    for host in hosts.values():
        taken = {worker.slot for worker in job.registry.on_host(host.name)}
        slots = (slot for slot in range(host.slots) if slot not in taken)
        room = max(0, host.slots - len(taken))
        free.update(dict.fromkeys((host.name, slot) for slot in islice(slots, room)))
    if limit is None or limit >= len(free):
        return list(free)
    vacated = [where for where in job.vacated if not job.hosts.distrusted(where[0])]
    first = dict.fromkeys(where for where in vacated if where in free)
    chosen = islice(_in_turn(job, {**first, **free}), max(0, limit))
    return sorted(chosen, key=lambda where: (hosts[where[0]].position, where[1]))


def _in_turn(job: JobState, free: dict[tuple[str, int], None]) -> dict[tuple[str, int], None]:
    """Free slots in the order in which to fill them.

    Host by host; but where a world needs several hosts, those of a unit in turn, so that the
    first one does not take all workers that are wanted.
    """
    width = units.width(job.settings)
    if width == 1:
        return free
    order = {host.name: n for n, host in enumerate(_ready_hosts(job))}
    levels = {host: len(job.registry.on_host(host)) for host in order}
    keyed: dict[tuple[str, int], tuple[int, int, int]] = {}
    for where in free:
        host = where[0]
        keyed[where] = (order[host] // width, levels[host], order[host])
        levels[host] += 1
    return dict.fromkeys(sorted(free, key=keyed.__getitem__))


def founding_slots(job: JobState) -> list[tuple[str, int]]:
    """The free slots for a round whose size is that of its birth: hosts in whole units."""
    where = free_slots(job, room_left(job))
    used = {w.host for w in job.registry.having(*ACTIVE) if not w.leaving}
    hosts = units.whole([*dict.fromkeys([*used, *(host for host, _ in where)])], job.settings)
    return [(host, slot) for host, slot in where if host in hosts]


def _ready_hosts(job: JobState) -> list[Host]:
    """Hosts that may get workers now, slow ones last; only hosts with agents are looked at."""
    named = (job.hosts.get(name) for name in job.fleet.agents if job.fleet.is_ready(name))
    usable = [host for host in named if host is not None and _eligible(job, host.name)]
    if _better_is_coming(job):
        usable = [host for host in usable if not job.hosts.distrusted(host.name)]
    return sorted(usable, key=job.hosts.preference)


def _better_is_coming(job: JobState) -> bool:
    """Whether slow hosts need not be used: others' agents start, and enough workers go on."""
    coming = any(not job.hosts.distrusted(agent.host) for agent in job.fleet.starting())
    return coming and job.registry.active() >= job.settings.min_np


def room_left(job: JobState) -> int | None:
    """How many more workers are wanted; None: any number."""
    return None if job.wanted is None else max(0, job.wanted - job.registry.active())


def place(
    job: JobState,
    where: list[tuple[str, int]],
    *,
    founders: bool,
    awaited: bool,
    reason: str,
) -> list[Worker]:
    """Start workers in these slots, all of them free; those started."""
    job.vacated.clear()
    if not where:
        return []
    known = [worker for worker in job.registry.having(*ACTIVE) if not worker.leaving]
    seats = [seat(worker) for worker in known]
    for index, (host, slot) in enumerate(where):
        name = worker_id(host, slot, job.registry.next_incarnation(host, slot))
        seats.append(Seat(name, host, slot, (True, job.registry.started + 1 + index)))
    places = dict(assign(seats))
    rank0 = next(iter(places.values()))
    tf_configs = _tf_configs(job, [(seat.host, seat.slot) for seat in seats])
    started = []
    for new in seats[len(known) :]:
        place_ = places[new.worker]
        worker = job.registry.add(new.worker, place_, founder=founders, awaited=awaited)
        tf_config = tf_configs.get((new.host, new.slot))
        job.order(new.host, _start_order(job, worker, rank0, tf_config), reason)
        started.append(worker)
    return started


def _tf_configs(job: JobState, members: list[Where]) -> dict[Where, str]:
    """TF_CONFIG of each member of the world to come; empty where the job has none."""
    if job.tf is None:
        return {}
    agents = {host: job.fleet.agents.get(host) for host, _ in members}
    rooms = {host: Room(a.address or host, a.slot_ports) for host, a in agents.items() if a}
    return job.tf.settle({where: rooms[where[0]] for where in members if where[0] in rooms})


def _start_order(
    job: JobState, worker: Worker, rank0: SlotInfo, tf_config: str | None
) -> StartWorkerOrder:
    forming = job.round.state is RoundState.FORMING
    round_number = job.round.number if forming else job.round.number + 1
    agent = job.fleet.agents.get(rank0.host)
    return StartWorkerOrder(
        worker=worker.id,
        place=worker.place,
        round=round_number,
        restart_count=job.restart_count,
        master_addr=agent.address if agent and agent.address else rank0.host,
        master_port=agent.port(round_number) if agent else FALLBACK_PORT,
        tf_config=tf_config,
    )
