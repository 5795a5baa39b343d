"""Spares (`--spares N`): workers that have run the script up to `@elastic.run` and wait.

A spare is in no slot and in no round. When a slot comes free on its host, a spare that is ready
gets it and is a member of the next round, so that the job is back at full size at the survivors'
next step. The next spare is started when that round has finished a step and no worker is booting,
because its start takes a core from the training. A spare whose process uses the device of the slot
it was started for can only take that slot.

The end of a spare is no failure of the job. The next one is started after a pause that doubles. If
`MAX_EARLY` in a row end before they are ready, the host gets no more, unless one that it still has
is promoted. Times are seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from elastic_driver.core import events as ev
from elastic_driver.core.rules.outcome import ScriptKind
from elastic_driver.core.rules.placement import Placement
from elastic_driver.core.rules.rounds import COMPLETE, Rule
from elastic_driver.core.rules.workers import (
    ACTIVE,
    RUNNING,
    SPARE,
    SPARES,
    STARTING,
    STOPPING,
    WARMING,
    Worker,
)
from elastic_driver.core.tf_config import Where
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import worker_log_events as worker_log

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

    def on_ready(self, worker: Worker, event: ev.WorkerReady, now: float) -> None:
        """Record that a spare waits for a slot."""
        self.workers.record_ready(worker, event)
        failures = self._failures.get(worker.host)
        if failures is not None and failures.early < MAX_EARLY:  # otherwise no more are started
            failures.early = 0
        self.effects.announce(worker_log.SpareReady(), "it waits for a free slot", worker)

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
            host, there = worker.host, self.workers.in_slots(worker.host)
            if not self.hosts.usable(host):
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
            if missing <= 0 or not (self.fleet.is_ready(host) and self.hosts.usable(host)):
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
