"""Which ranks hold a running job up: reads what workers measured, tells what changes.

The driver's mailbox thread owns one, tells it of each new world and lets it look when it is due.
The verdict is `policies.stragglers.compute`', one watch for each complete round; here its reports
are read from the store. It stands beside the job machine and not in it: only verdicts become
events there, for `core.rules.replacing`; step times need neither be journalled nor pass through
the mailbox.

A look reads one key of each worker and takes at most a twentieth of the thread's time, however many
there are. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_driver import contract
from elastic_driver.core.decisions import Announce
from elastic_driver.core.documents import Progress, World, decode_progress
from elastic_driver.core.events import Event, RankRecovered, RankSlow
from elastic_driver.core.status import SlowStatus
from elastic_driver.policies.stragglers.compute import Change, Slowness, StragglerWatch
from elastic_driver.policies.stragglers.links import LinkWatch
from elastic_driver.policies.stragglers.robust import median
from elastic_driver.runtime.work_mover import Apply, WorkMover
from rendezvous.errors import RendezvousError
from rendezvous.wire import Entries, Get

LOOK_S = 0.25  # workers of a small world beat as often
READ_S = 1.0  # for the store to answer
SHARE = 20.0  # a look that took long is followed by so many times as long without one


class SlowRanks:
    """Watches the ranks of the newest round.

    `apply` carries out operations on the job's store, within a second or it raises
    RendezvousError; `clock` is monotonic; `post` hears of ranks that compute slowly.
    """

    def __init__(
        self, apply: Apply, clock: Callable[[], float], post: Callable[[Event], None]
    ) -> None:
        self._apply, self._clock, self._post = apply, clock, post
        self._world: World | None = None
        self._watch: StragglerWatch | None = None
        self._links = LinkWatch(())
        self._due = 0.0
        self._seen = 0  # the newest revision that was read
        self._false_alarms = 0  # of earlier rounds
        self.step = 0  # committed steps, as the workers said last
        self._mover = WorkMover(apply)

    @property
    def due(self) -> float | None:
        """When to look next; None: there is no world yet."""
        return None if self._world is None else self._due

    @property
    def false_alarms(self) -> int:
        """Alarms that were withdrawn so soon that nothing was wrong, in the whole job."""
        alarms = self._watch.false_alarms if self._watch else 0
        return self._false_alarms + alarms + self._links.false_alarms

    def status(self) -> tuple[SlowStatus, ...]:
        """The ranks that are slow now."""
        world, watch = self._world, self._watch
        if world is None or watch is None:
            return ()
        return tuple(
            SlowStatus(s.rank, s.host, world.members[s.rank].worker, s.kind.value, s.ratio, s.step)
            for s in (*watch.slow, *self._links.slow)
        )

    def enter(self, world: World) -> None:
        """A round is complete: forget the one before, and watch this one."""
        self._false_alarms = self.false_alarms
        base = max(member.version for member in world.members)
        hosts = [member.place.host for member in world.members]
        self._world, self._watch = world, StragglerWatch(hosts, first_step=base + 1)
        self._links = LinkWatch(hosts)
        self._mover.enter(world)
        self._due = self._clock() + LOOK_S

    def look(self) -> list[Announce]:
        """Read what the workers have written; what there is to tell about it."""
        world, watch = self._world, self._watch
        if world is None or watch is None:
            return []
        began = self._clock()
        changes: list[Change] = []
        read = self._read(world)
        known = [progress.step_time for progress in read if progress is not None]
        watch.step_time = median(known) if known else watch.step_time
        for rank, progress in enumerate(read):
            if progress is not None:
                self.step = max(self.step, progress.step)
                for sample in progress.samples:
                    changes += watch.report(rank, sample.step, sample.compute)
                if progress.links is not None:
                    self._links.report(rank, progress.step, progress.links)
        if known:
            changes += self._links.look(watch.step_time)
        moved = self._mover.look(read)
        for change in changes:
            if change.slow.kind is Slowness.COMPUTE:
                self._post(_event(change, world))
        ended = self._clock()
        self._due = ended + max(LOOK_S, SHARE * (ended - began))
        return [*(_announce(change, world) for change in changes), *moved]

    def _read(self, world: World) -> list[Progress | None]:
        """By rank, what each has written in this round; None where that is nothing new."""
        keys = [contract.worker_progress(member.worker) for member in world.members]
        try:
            (found,) = self._apply([Get(tuple(keys))])
        except RendezvousError:  # the store has more to do than it can: it is asked again
            return []
        entries = found.entries if isinstance(found, Entries) else {}
        seen, self._seen = self._seen, max([self._seen, *(e.revision for e in entries.values())])
        new = {key: entry for key, entry in entries.items() if entry.revision > seen}
        read = [decode_progress(new[key].value) if key in new else None for key in keys]
        return [p if p is not None and p.round == world.round else None for p in read]


def _event(change: Change, world: World) -> Event:
    worker = world.members[change.slow.rank].worker
    if change.over:
        return RankRecovered(worker, world.round)
    return RankSlow(worker, world.round, change.slow.ratio)


def _announce(change: Change, world: World) -> Announce:
    slow = change.slow
    member = world.members[slow.rank]
    if change.over:
        event, reason = "rank_recovered", f"rank {slow.rank} on {slow.host} is no longer slow"
    else:
        event, reason = "rank_slow", slow.describe()
    return Announce(
        event,
        reason,
        round=world.round,
        host=slow.host,
        slot=member.place.slot,
        rank=slow.rank,
        worker=member.worker,
        detail={"kind": slow.kind.value, "ratio": round(slow.ratio, 3), "step": slow.step},
    )
