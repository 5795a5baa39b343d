"""The goodput ledger: the seconds of every worker slot, by class. Pure; built from the event log.

The job aims at a number of slots: those of the hosts that discovery reports and nobody has drained,
at least `--min-np`, at most the number of workers wanted. Each of these slots, and each slot that a
worker is in, is in one class at every moment:

- `waiting`: no host can give the slot. A ready worker waits, too, if there are too few for a world.
- `starting`: a host can give the slot; it has no worker, or one that was not ready yet. Ends with
  `worker_ready`.
- `forming`: from `worker_ready`, the worker waits for a round; ends with `round_completed`.
- `syncing`: from then on, until the groups are made and the state is the same on all ranks.
- `training`: from that moment, which `state_synced` tells, until the worker leaves the round.
- `redone`: the same, but the steps were trained before. Ends with `steps_redone`.
- `slow`: of each second between `rank_slow` and `rank_recovered`, the share for which all ranks
  wait for the slow one: what it takes longer than the others in a step, over the whole step.
- `lost`: from the last commit before a loss until `worker_ready`, or the end of the worker's
  process; and from the end of a worker after which no other one follows until the job's end.

A worker tells afterwards how long it has trained: since the state was the same (`seconds` of
`state_synced`), or since the last commit (`undone` of `worker_ready`). Only then is this time moved
to its class. Scripts that do not use our API report no steps: they train from `processes_started`
until their end, or until one of them fails. That a script is of this kind shows later, at
`round_completed` or the end of a worker.

Times are unix seconds, and never go back: an earlier time counts as the latest one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from elastic_driver.kernel.log import LogEvent
from elastic_driver.kernel.tables import Snapshots, saved
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.log_lines import LogLine, read_line

Class = Literal["training", "redone", "forming", "syncing", "starting", "waiting", "slow", "lost"]
CLASSES: tuple[Class, ...] = get_args(Class)
_State = Literal["starting", "ready", "syncing", "training", "lost"]  # of a slot with a worker
_STATES: tuple[_State, ...] = get_args(_State)


@dataclass(slots=True)
class _Host:
    """A host: its slots, and what keeps it from getting workers."""

    slots: int = 0  # 0: discovery does not report it
    taken: int = 0  # slots with a worker
    cooling: bool = False
    unreachable: bool = False
    drained: bool = False

    @property
    def present(self) -> int:
        """The slots that the job may aim at."""
        return 0 if self.drained else self.slots

    @property
    def room(self) -> int:
        """The slots that could get a worker now."""
        usable = not (self.drained or self.cooling or self.unreachable)
        return max(0, self.slots - self.taken) if usable else 0


@dataclass(slots=True)
class _Slot:
    """A slot with a worker."""

    worker: str
    state: _State
    since: float  # the beginning of the state; of the training, if the state is "lost"
    lost_at: float | None = None  # the end of a peer, if the state is "lost"


@dataclass(slots=True)
class Ledger(Snapshots):
    """The seconds of each class so far; `feed` it with the lines of the event log, in order."""

    seconds: dict[Class, float] = saved(factory=lambda: dict.fromkeys(CLASSES, 0.0))
    step: int = saved(0)  # committed steps: the most that are known
    redoing: bool = saved(False)  # the steps that are trained now were trained before
    steps_redone: int = saved(0)  # steps that had to be trained again
    failures: int = saved(0)  # of workers
    began: float | None = saved(None)
    processes: int = saved(0)  # that were started for a round which is not complete
    running_since: float | None = saved(None)  # all processes of the round, or all its members
    ended: bool = saved(False)
    at: float = saved(0.0)  # the time up to which `seconds` counts
    _shown: dict[Class, float] = saved(factory=dict, name="shown")  # by `counters`
    _least: int = saved(1, name="least")  # workers that a world needs
    _wanted: int | None = saved(None, name="wanted")
    _hosts: dict[str, _Host] = saved(factory=dict, name="hosts")
    _slots: dict[tuple[str, int], _Slot] = saved(factory=dict, name="slots")
    _states: dict[_State, int] = saved(factory=lambda: dict.fromkeys(_STATES, 0), name="states")
    _slow: dict[str, float] = saved(factory=dict, name="slow")  # the share of a step, by worker
    _fallen: list[tuple[float, float]] = saved(
        factory=list, name="fallen"
    )  # began to train, was lost
    _committed: float | None = saved(
        None, name="committed"
    )  # the last commit of a round that broke
    _present: int = saved(0, name="present")  # sums over `_hosts`
    _room: int = saved(0, name="room")
    elastic: bool = saved(False)  # a worker has been ready: the script uses our API
    _finishing: bool = saved(False, name="finishing")
    _failed: set[str] = saved(factory=set, name="failed")  # see `is_new_loss`

    # ---- reading -------------------------------------------------------------------------

    def document(self, now: float) -> dict[str, Any]:
        """Return the key `goodput` of `GET /v1/status`; `slots` is the mean over `wall` seconds."""
        sums, wall = self._sums(now), self.wall(now)
        whole = sum(sums.values())
        return {
            "seconds": {name: round(value, 6) for name, value in sums.items()},
            "goodput": sums["training"] / whole if whole else 0.0,
            "slots": whole / wall if wall else float(sum(slots for _, slots in self._weights())),
            "wall": wall,
        }

    def counters(self, now: float) -> dict[Class, float]:
        """Return the seconds of each class as counters, which never go back.

        A class from which time was moved afterwards stands still until it has caught up.
        """
        sums = self._sums(now)
        self._shown = {name: max(sums[name], self._shown.get(name, 0.0)) for name in CLASSES}
        return self._shown

    def wall(self, now: float) -> float:
        """Return the seconds since the job began, until its end."""
        if self.began is None:
            return 0.0
        return (self.at if self.ended else max(now, self.at)) - self.began

    @property
    def workers(self) -> int:
        """The members of the present world."""
        return self._states["syncing"] + self._states["training"]

    @property
    def aim(self) -> int:
        """The slots that the job aims at."""
        present = max(self._present, self._least)
        return present if self._wanted is None else min(self._wanted, present)

    # ---- feeding -------------------------------------------------------------------------

    def feed(self, line: LogLine | None) -> None:
        """Take in the next line of the log; a line of another kind changes nothing."""
        if line is None or self.ended:
            return
        if self.began is None:
            self.began = self.at = line.t
        self._advance(line.t)
        match line.what:
            case log.JobEnd(step=step):
                self.ended, self.step = True, max(self.step, step or 0)
            case log.JobStarted(min_np=least, max_np=most, wanted=wanted):
                self._least, self._wanted = least or 1, wanted or most
            case log.ScaleRequested() | log.PlanApplied() | log.SizeProposed() as asked:
                self._wanted = asked.wanted or self._wanted
            case log.ProcessesStarted(size=size):
                self.processes, self.running_since = size or 0, line.t
            case log.RoundCompleted(size=size):
                self._round_completed(size)
            case log.StateSynced() as synced:
                self._synced(synced)
            case log.RoundClosed(step=step):
                self.step = max(self.step, step or 0)
            case log.StepsRedone():
                self.redoing = False
            case LogEvent() as what:
                self._of_part(line, what)

    def _of_part(self, line: LogLine, what: LogEvent) -> None:
        """Take in an event of a worker or of a host."""
        if line.host is None:
            return
        if line.slot is not None and line.worker is not None:
            self._of_worker((line.host, line.slot), line.worker, what)
        elif line.worker is None:
            self._of_host(line.host, what)

    # ---- time ----------------------------------------------------------------------------

    def _weights(self) -> list[tuple[Class, float]]:
        """Return how many slots are in a class now; a class may come twice, or not at all."""
        states = self._states
        empty = max(0, self.aim - len(self._slots))
        opened = 0 if self._finishing else min(empty, self._room)
        too_few = len(self._slots) + self._room < self._least and not self.workers
        ready: Class = "waiting" if too_few and not self._finishing else "forming"
        return [
            ("starting", states["starting"] + opened),
            ("lost" if self._finishing else "waiting", empty - opened),
            (ready, states["ready"]),
            ("syncing", states["syncing"]),
            ("lost", states["lost"]),
            *((name, share * states["training"]) for name, share in self._training()),
        ]

    def _training(self) -> list[tuple[Class, float]]:
        """Return the classes of a second of training, with their shares."""
        if self.redoing:
            return [("redone", 1.0)]
        slow = max(self._slow.values(), default=0.0)
        return [("training", 1.0 - slow), ("slow", slow)] if slow else [("training", 1.0)]

    def _sums(self, now: float) -> dict[Class, float]:
        sums, passed = dict(self.seconds), now - self.at
        if passed > 0 and not self.ended and self.began is not None:
            for name, slots in self._weights():
                sums[name] += passed * slots
        return sums

    def _advance(self, now: float) -> None:
        self.seconds = self._sums(now)
        self.at = max(self.at, now)

    def _untrain(self, seconds: float) -> None:
        """Turn the last seconds of one slot's training into lost ones."""
        for name, share in self._training():
            moved = min(max(0.0, seconds) * share, self.seconds[name])
            self.seconds[name] -= moved
            self.seconds["lost"] += moved

    # ---- slots and workers ---------------------------------------------------------------

    def _of_worker(self, where: tuple[str, int], worker: str, what: LogEvent) -> None:
        slot = self._slots.get(where)
        match what:
            case worker_log.WorkerStarted():
                if slot is None or slot.worker != worker:  # READY may be sooner
                    self._put(where, worker, "starting")
            case worker_log.SparePromoted():
                self._put(where, worker, "ready")
            case worker_log.RankSlow(ratio=ratio, share=known):
                share = 1 - 1 / max(ratio, 1.0) if known is None else known
                self._slow[worker] = min(max(share, 0.0), 1.0)
            case worker_log.RankRecovered():
                self._slow.pop(worker, None)
            case worker_log.WorkerReady(undone=undone):
                self.elastic = True
                if slot is not None and slot.state in ("training", "lost"):
                    self._left(slot, undone or 0.0)
                self._put(where, worker, "ready")
            case _ if isinstance(what, worker_log.END):
                is_lost = worker_log.is_new_loss(what, worker, self._failed)
                self.failures += is_lost
                if slot is not None and slot.worker == worker:
                    self._ended(where, slot, what, is_lost=is_lost)

    def _put(self, where: tuple[str, int], worker: str, state: _State) -> None:
        """Put a worker into a slot, in place of the one that was there."""
        slot = self._slots.get(where)
        if slot is None:
            slot = self._slots[where] = _Slot(worker, state, self.at)
            self._change(where[0], taken=1)
        else:
            self._states[slot.state] -= 1
            slot.worker, slot.state, slot.since, slot.lost_at = worker, state, self.at, None
        self._states[state] += 1

    def _drop(self, where: tuple[str, int]) -> None:
        self._states[self._slots.pop(where).state] -= 1
        self._change(where[0], taken=-1)

    def _enter(self, slot: _Slot, state: _State, since: float) -> None:
        self._states[slot.state] -= 1
        slot.state, slot.since = state, since
        self._states[state] += 1

    def _left(self, slot: _Slot, undone: float) -> None:
        """Record that a worker has left its round; what it had not committed is lost.

        All ranks commit together, so the same holds for the workers that are gone since then.
        """
        committed = self.at - undone
        if undone > 0:
            self._untrain((slot.lost_at or self.at) - max(slot.since, committed))
            for began, until in self._fallen:
                self._untrain(until - max(began, committed))
            self._fallen.clear()
            self._committed = committed

    def _ended(self, where: tuple[str, int], slot: _Slot, what: LogEvent, *, is_lost: bool) -> None:
        """Record the end of a worker; if it breaks the round, the others train no more."""
        if slot.state == "starting" and self.processes and not self.elastic:
            self._was_plain()
        if slot.state in ("training", "lost"):
            until = slot.lost_at or self.at
            if self._committed is None:
                self._fallen.append((slot.since, until))
            else:
                self._untrain(until - max(slot.since, self._committed))
        was_member = slot.state in ("syncing", "training", "lost")
        self._drop(where)
        if isinstance(what, worker_log.WorkerExited):
            finished = what.exit_code == 0 and not (what.expected or what.is_loss)
            self._finishing = self._finishing or finished or bool(what.job_over)
        if is_lost and was_member and not self._finishing:
            self._break_round()

    def _break_round(self) -> None:
        for slot in self._slots.values():
            if slot.state == "training":
                slot.lost_at = self.at
                self._enter(slot, "lost", slot.since)

    # ---- rounds --------------------------------------------------------------------------

    def _was_plain(self) -> None:
        """Let the workers have trained since all processes were started: it is a plain script."""
        since = self.at if self.running_since is None else self.running_since
        moved = min(self._states["starting"] * (self.at - since), self.seconds["starting"])
        self.seconds["starting"] -= moved
        self.seconds["training"] += moved
        for slot in self._slots.values():
            if slot.state == "starting":
                self._enter(slot, "training", since)
        self.processes = 0

    def _round_completed(self, size: int | None) -> None:
        self._slow.clear()
        self._fallen.clear()
        self._committed, self.redoing = None, False
        if self.processes and not self.elastic:
            self._was_plain()
            return
        self.processes, self.running_since = 0, self.at
        members: _State = "ready" if self.elastic else "starting"
        whole = self._states[members] == size
        for where, slot in list(self._slots.items()):
            if slot.state == members or (
                slot.state in ("training", "syncing", "lost") and not whole
            ):
                self._enter(slot, "syncing" if self.elastic else "training", self.at)
            elif slot.state in ("training", "syncing", "lost"):
                self._drop(where)  # its end is not in the log, as a driver died before it wrote it

    def _synced(self, what: log.StateSynced) -> None:
        """Move the time since the state was the same on all ranks from `syncing` to `training`."""
        first, before = what.first_step or 0, self.step
        if 0 < first <= before:
            self.steps_redone += before - first + 1
            self.redoing = True
        self.step = max(before, first)
        for slot in self._slots.values():
            if slot.state == "syncing":
                since = max(slot.since, self.at - (what.seconds or 0.0))
                moved = min(self.at - since, self.seconds["syncing"])
                self.seconds["syncing"] -= moved
                for name, share in self._training():
                    self.seconds[name] += share * moved
                self._enter(slot, "training", since)
        self.redoing = self.redoing and first < before

    # ---- hosts ---------------------------------------------------------------------------

    def _of_host(self, name: str, what: LogEvent) -> None:
        match what:
            case host_log.HostDiscovered(slots=slots):
                self._change(name, slots=slots or 0)
            case host_log.HostRemoved():
                self._change(name, slots=0, unreachable=False, drained=False)
            case host_log.HostBlacklisted():
                self._change(name, cooling=True)
            case host_log.HostUnreachable() | host_log.HostRefused():
                self._change(name, unreachable=True)
            case host_log.HostResurrected() | host_log.AgentStarted():
                self._change(name, cooling=False, unreachable=False)
            case host_log.HostDrained():
                self._change(name, drained=True)
            case host_log.DrainCancelled():
                self._change(name, drained=False)

    def _change(self, name: str, *, taken: int = 0, **news: Any) -> None:
        """Change what is known of a host, and with it the sums over all hosts."""
        host = self._hosts.setdefault(name, _Host())
        self._present -= host.present
        self._room -= host.room
        host.taken += taken
        for field_name, value in news.items():
            setattr(host, field_name, value)
        self._present += host.present
        self._room += host.room


def read_ledger(lines: Iterable[bytes]) -> Ledger:
    """Return the ledger of the last run in an event log."""
    ledger = Ledger()
    for line in lines:
        read = read_line(line)
        if read is not None and isinstance(read.what, log.JobStarted):  # the run id was used again
            ledger = Ledger()
        ledger.feed(read)
    return ledger
