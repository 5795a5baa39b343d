"""Jobs that do not go on: workers that hang, the stacks of all workers, and rounds that wait.

A worker that makes no progress for longer than its limit reports that, and where its training
thread stands: in a collective, waiting for others, or elsewhere (`worker.heartbeat.watches`).
One report proves little: a worker in a collective may wait for another. So `Hangs` waits until all
members of the round have reported, or `settle` seconds, and then:

- one stands elsewhere while the others wait: it hangs, and is given up;
- several stand elsewhere: the round is broken, and a worker that does not leave it hangs;
- all wait in collectives: these do not match. The round is broken once, because a lost message
  heals that way. When it happens again without a step in between, the job fails and says which
  ranks wait where;
- all stand elsewhere: most likely a long evaluation that does not report its own progress. It is
  announced. The round is broken only when it lasts (or at once, if the user set the limit).

A member that reports a long task of its own does not report a stall, so no worker is blamed for
waiting for it.

`Stacks` asks for the stack of every worker when one first reports a stall, when one is silent, or
when a user asks (`elasticctl stacks`). Workers answer from their heartbeat thread. Their agents
answer too, with what py-spy sees, because a process that is stopped or holds the GIL cannot answer.
A worker's own answer replaces its agent's. When all have answered, or after `ANSWER_S`, the event
`stacks_collected` names the groups of ranks.

A round that does not form is announced by `Waits`. A forgotten variable, a host too few or a name
that leads nowhere looks like a slow start: nothing happens until `--start-timeout`. So a wait of a
few seconds is announced once in a round, with who is missing, why the job expects them, and how to
say otherwise. Times are monotonic seconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from elastic_driver.job.decisions import AskStacks
from elastic_driver.job.events import takes
from elastic_driver.job.reports import Reports
from elastic_driver.job.rounds import COMPLETE, FORMING, Rule
from elastic_driver.job.workers import ACTIVE, READY, RUNNING, STARTING, Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.findings import StackGroup
from elastic_driver.words.orders import StacksOrder
from elastic_driver.words.wire_events import SEEN_WAITING, shorten

LEAVE_S = 5.0  # to leave a round that was broken; a worker that can leave needs well under a second
LONG_STALL = 8.0  # times the first report's duration: even an evaluation is then taken for a hang
ANSWER_S = 1.5  # a heartbeat thread answers within milliseconds, an agent within a second
MAX_STACK_CHARS = 8000  # of one group's stack in the event log
MAX_GROUPS = 16  # with their stacks; of further groups, only their number is kept
NO_ANSWER = "no answer"
COLLECTIVE = "collective"
_NOT_THE_SCRIPT = ("/torch/", "/elastic_driver/", "/threading.py", "/contextlib.py")


# ---- stacks ------------------------------------------------------------------------------


class StackAnswer(NamedTuple):
    """One worker's answer."""

    where: str
    stack: str
    own: bool  # from the worker itself, not from its agent


@dataclass(slots=True)
class Stacks(Rule):
    """Asks for stacks and collects the answers, one question at a time."""

    asked: int = saved(0)  # questions so far
    _asked_at: float | None = saved(None, name="asked_at")  # None: no question is open
    _reason: str = saved("", name="reason")
    _answers: dict[str, StackAnswer] = saved(factory=dict, name="answers")  # by worker

    def ask(self, now: float, reason: str) -> None:
        """Ask every worker and every agent, unless a question is open already."""
        if self._asked_at is not None:
            return
        self.asked += 1
        self._asked_at, self._reason = now, reason
        self.effects.decide(AskStacks(self.asked, reason))
        for host in sorted({worker.host for worker in self._asked_workers()}):
            self.effects.give(host, StacksOrder(self.asked), reason)

    def resume(self, now: float) -> None:
        """Ask again if a question is open; workers that have answered are not asked twice."""
        if self._asked_at is not None:
            self._asked_at = now
            self.effects.decide(AskStacks(self.asked, self._reason))

    @takes(ev.StacksRequested)
    def on_requested(self, event: ev.StacksRequested, now: float) -> None:
        """Ask every worker, because a user wants it."""
        self.ask(now, event.reason or "a user asks")

    @takes(ev.WorkerStack)
    def on_worker_stack(self, event: ev.WorkerStack, now: float) -> None:
        """Record an answer."""
        stale = self._asked_at is None or event.number != self.asked
        if stale or event.worker not in self.workers.workers:
            raise ev.StaleEvent(f"a stack of {event.worker} for a question that is not open")
        self.note(event.worker, StackAnswer(event.where, event.stack, event.own))

    def note(self, worker: str, answer: StackAnswer) -> None:
        """Record a stack from any source, if a question is open."""
        if self._asked_at is not None and (answer.own or worker not in self._answers):
            self._answers[worker] = answer

    def advance(self, now: float) -> Iterable[Wait]:
        """Settle the question when all workers have answered, or the time is over."""
        if self._asked_at is None:
            return
        own = {worker for worker, answer in self._answers.items() if answer.own}
        complete = own.issuperset(worker.id for worker in self._asked_workers())
        wait = Wait(self._asked_at + ANSWER_S)
        if complete or wait.is_over(now):
            self.settle()
        else:
            yield wait

    def settle(self) -> None:
        """Announce the answers so far; called before a worker is killed, as they are evidence."""
        if self._asked_at is None:
            return
        unknown = StackAnswer(NO_ANSWER, "", own=False)
        asked = self._asked_workers()
        groups = group({w.place.rank: self._answers.get(w.id, unknown) for w in asked})
        self._asked_at, self._answers = None, {}
        reason = f"{self._reason}: {describe(groups)}"
        self.effects.announce(worker_log.StacksCollected(stacks=groups[:MAX_GROUPS]), reason)

    def _asked_workers(self) -> Sequence[Worker]:
        """Return the round's members; if none trains yet, every worker that has a process."""
        running = tuple(self.workers.having(RUNNING))
        return running or tuple(self.workers.having(STARTING, READY))


def group(places: Mapping[int, StackAnswer]) -> tuple[StackGroup, ...]:
    """Return ranks with the same stack as one group; the smallest group first, then by rank."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank][:2], []).append(rank)
    found = [
        StackGroup(tuple(r), key[0], shorten(key[1], MAX_STACK_CHARS)) for key, r in groups.items()
    ]
    found.sort(key=lambda g: (len(g.ranks), g.ranks))
    odd = odd_ranks(found)
    return tuple(replace(g, odd=odd.issuperset(g.ranks)) for g in found)


def odd_ranks(groups: Sequence[StackGroup]) -> frozenset[int]:
    """Return the ranks for which the others seem to wait; none if that is not known.

    If some ranks wait in a collective, these are the ranks that are not in one, or did not answer.
    If no rank answers for itself, the ranks that an agent sees waiting count as the waiting ones.
    Otherwise it is the smallest of two or more groups, if there is only one of its size.
    """
    ranks = sum(len(g.ranks) for g in groups)
    for waiting in (COLLECTIVE, SEEN_WAITING):
        apart = frozenset(rank for g in groups if g.where != waiting for rank in g.ranks)
        if 0 < len(apart) < ranks:
            return apart
    smallest = len(groups) > 1 and len(groups[0].ranks) < len(groups[1].ranks)
    return frozenset(groups[0].ranks if smallest else ())


def describe(groups: Sequence[StackGroup]) -> str:
    """Return the groups in a sentence, the odd ones first."""
    said = {COLLECTIVE: "in a collective", "elsewhere": "outside of collectives"}
    apart = {True: " (apart from the others)", False: ""}
    first = sorted(groups, key=lambda g: not g.odd)[:MAX_GROUPS]
    parts = [f"{name_ranks(g.ranks)} {said.get(g.where, g.where)}{apart[g.odd]}" for g in first]
    if len(groups) > MAX_GROUPS:
        parts.append(f"{len(groups) - MAX_GROUPS} more groups")
    return ", ".join(parts) or "there are no workers"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ---- hangs -------------------------------------------------------------------------------


class Stall(NamedTuple):
    """A member's report that its training thread makes no progress."""

    waits: bool  # in a collective
    seconds: float  # without progress, at the time of the last report
    at: float  # the time at which this driver heard of it
    first_seconds: float  # without progress, at the time of the first report
    stack: str
    collectives: int = 0  # that it has begun in this round

    @property
    def place(self) -> str:
        """The innermost place in the script itself, for a sentence."""
        lines = [line.strip() for line in self.stack.splitlines()]
        places = [line for line in lines if line.startswith("File ")]
        own = [line for line in places if not any(name in line for name in _NOT_THE_SCRIPT)]
        return (own or places or ["an unknown place"])[-1]


@dataclass(slots=True)
class Hangs(Rule):
    """Gives up the members that hang, and breaks rounds in which no member can go on."""

    stacks: Stacks
    reports: Reports
    # `outcome.steps_reported` when a mismatch broke a round.
    mismatched_at: int | None = saved(None)
    _stalls_of: dict[str, Stall] = saved(factory=dict, name="stalls")
    _stalls_in: int = saved(0, name="stalls_in")  # the round of these stalls

    @property
    def _stalls(self) -> dict[str, Stall]:
        """The stalls of the present round, by worker."""
        return self._stalls_of if self._stalls_in == self.rounds.current.number else {}

    @takes(ev.WorkerStalled)
    def on_stalled(self, worker: Worker, event: ev.WorkerStalled, now: float) -> None:
        """Record that a worker makes no progress.

        It may be in a round that a resumed driver does not know, and that it was told to leave.
        """
        inside = worker.left < event.round <= self.rounds.newest
        if worker.state not in ACTIVE or not inside:
            raise ev.StaleEvent(f"{worker.id} stalled in round {event.round}, which it has left")
        stalls = self._stalls_of = self._stalls
        self._stalls_in = self.rounds.current.number
        earlier = stalls.get(worker.id)
        waits = event.where == COLLECTIVE
        stack = shorten(event.stack, MAX_STACK_CHARS)
        seconds, at, first = event.seconds, now, event.first or event.seconds
        if earlier is not None:  # of two reports the earlier may come later
            seconds = max(seconds, earlier.seconds)
            at = earlier.at
            first = min(first, earlier.first_seconds)
        stalls[worker.id] = Stall(waits, seconds, at, first, stack, event.collectives)
        if earlier is None:
            where = "in a collective" if waits else "elsewhere"
            reason = f"no progress for {event.seconds:.1f} s, its training thread stands {where}"
            self.effects.announce(
                worker_log.WorkerStalled(where=event.where, stack=stack), reason, worker
            )
            if len(stalls) == 1:
                self.stacks.ask(now, f"{worker.id} makes no progress")
        elif worker.state is not RUNNING and event.seconds > earlier.seconds:
            self._give_up(worker, "and does not leave a round that this driver does not know", now)
        self.stacks.note(worker.id, StackAnswer(event.where, stack, own=True))

    @takes(ev.WorkerResumed)
    def on_resumed(self, worker: Worker, event: ev.WorkerResumed, now: float) -> None:
        """Forget the stall of a worker that makes progress again."""
        same_round = event.round == self.rounds.current.number
        if not same_round or self._stalls.pop(worker.id, None) is None:
            raise ev.StaleEvent(f"{worker.id} goes on, and was not known to stand still")
        self.effects.announce(worker_log.WorkerResumed(), "it makes progress again", worker)

    def advance(self, now: float) -> Iterable[Wait]:
        """Judge the members that stand still."""
        stalls = self._stalls
        if not stalls or not self.outcome.elastic:
            return
        running = list(self.workers.having(RUNNING))
        reported = [worker for worker in running if worker.id in stalls]
        elsewhere = [worker for worker in reported if not stalls[worker.id].waits]
        current = self.rounds.current
        if not reported:
            return
        if current.state is not COMPLETE and not current.at_boundary:
            yield from self._give_up_unmoved(elsewhere or reported, now)
            return
        if len(reported) < len(running):
            first = min(stalls[worker.id].at for worker in reported)
            why = f"{reported[0].id} makes no progress; the others may report the same"
            wait = Wait(first + self.settings.settle, why)
            if not wait.is_over(now):
                yield wait
                return
        self.stacks.settle()
        if len(elsewhere) == 1 and len(running) > 1:
            self._give_up(elsewhere[0], "while its peers wait for it", now)
        elif elsewhere:
            found = [stalls[worker.id] for worker in elsewhere]
            lasts = all(stall.seconds >= LONG_STALL * stall.first_seconds for stall in found)
            evaluates = len(elsewhere) == len(running) and self.settings.hang_timeout is None
            if lasts or not evaluates:
                stand = counted(len(elsewhere), "worker stands", "workers stand")
                self.rounds.leave(now, f"no progress: {stand} outside of collectives")
        elif len(reported) == len(running):
            self._break_mismatch(reported, now)

    def _give_up_unmoved(self, suspects: list[Worker], now: float) -> Iterator[Wait]:
        """Give up workers that do not leave a round that is closing, after `LEAVE_S`."""
        stalls = self._stalls
        since = max(self.rounds.current.since, *(stalls[worker.id].at for worker in suspects))
        wait = Wait(since + LEAVE_S, f"{suspects[0].id} does not leave the round")
        if not wait.is_over(now):
            yield wait
            return
        for worker in suspects:
            self._give_up(worker, "and does not leave the round", now)

    def _give_up(self, worker: Worker, how: str, now: float) -> None:
        stall = self._stalls[worker.id]
        reason = f"no progress for {stall.seconds:.1f} s {how}: {stall.place}"
        self.reports.give_up_worker(worker, reason, now, stall.stack)

    def _break_mismatch(self, workers: Sequence[Worker], now: float) -> None:
        """Break a round in which all wait for each other; the second time, end the job.

        Once may be an accident, twice is a fault of the script.
        """
        places: dict[str, list[int]] = {}
        for worker in sorted(workers, key=lambda worker: worker.place.rank):
            places.setdefault(self._stalls[worker.id].place, []).append(worker.place.rank)
        where = "; ".join(f"{name_ranks(ranks)} at {place}" for place, ranks in places.items())
        begun = {w.place.rank: self._stalls[w.id].collectives for w in workers}
        where += uneven(begun)
        if self.mismatched_at == self.outcome.steps_reported:
            what = f"all {len(workers)} workers wait in collectives that do not match, again"
            self.outcome.fail(f"{what}: {where}")
            return
        self.mismatched_at = self.outcome.steps_reported
        hint = "every rank has to call the same collectives, in the same order"
        follows = "the round is broken once, as a lost message heals in this way"
        self.effects.announce(worker_log.CollectivesDiffer(), f"{where}; {hint}; {follows}")
        self.rounds.leave(now, f"no progress: collectives that do not match: {where}")


def uneven(begun: Mapping[int, int]) -> str:
    """Return a clause about the ranks that have begun more collectives than others; may be empty.

    `begun`: how many, by rank.
    """
    least = min(begun.values())
    most = max(begun.values())
    if least == most:
        return ""
    ahead = [rank for rank in sorted(begun) if begun[rank] == most]
    behind = [rank for rank in sorted(begun) if begun[rank] == least]
    have = "have" if len(ahead) > 1 else "has"
    called = "a collective" if most - least == 1 else f"{most - least} collectives"
    return f"; {name_ranks(ahead)} {have} called {called} that {name_ranks(behind)} did not"


# ---- rounds that do not form -------------------------------------------------------------

SILENT_S = 5.0  # without hosts or agents that are needed
BOOT_S = 30.0  # without workers that import their modules, say
LOOKS_S = (SILENT_S, BOOT_S)  # after the beginning of a round
_NAMED = 4


@dataclass(slots=True)
class Waits(Rule):
    """Announces a wait for hosts, agents or workers."""

    looked: dict[int, int] = saved(factory=dict)  # the present round → looks so far
    told: str = saved("")  # in the present round

    def advance(self, now: float) -> Iterable[Wait]:
        """Look at two moments of each round that forms, because a look takes O(hosts)."""
        current, outcome = self.rounds.current, self.outcome
        over = outcome.finishing or outcome.first_success is not None
        if current.state is not FORMING or over or self.fleet.awaited:
            return
        if current.number not in self.looked:
            self.looked, self.told = {current.number: 0}, ""
        looks = self.looked[current.number]
        if looks < len(LOOKS_S) and now >= current.since + LOOKS_S[looks]:
            self._look(LOOKS_S[looks], first=current.number == 1)
            looks += 1
            self.looked = {current.number: looks}
        if looks < len(LOOKS_S):
            yield Wait(current.since + LOOKS_S[looks])

    def _look(self, after: float, *, first: bool) -> None:
        """Announce what is missing, unless that was announced in this round."""
        need = self.capacity.at_most_wanted(
            self.settings.start_np if first else self.capacity.least
        )
        there = sum(h.slots for h in self.hosts.known.values() if self.fleet.is_ready(h.name))
        what = "hosts" if there < need else "workers"
        missing = tuple(self._missing_hosts() if what == "hosts" else self._missing_workers())
        late = what == "hosts" or (missing and after >= BOOT_S)
        if late and self.told != what:
            self.told = what
            self.effects.announce(log.JobWaits(), self._describe(what, after, need, there, missing))

    def _describe(
        self, what: str, after: float, need: int, there: int, missing: tuple[str, ...]
    ) -> str:
        named = ", ".join(missing[:_NAMED]) + ", …" * (len(missing) > _NAMED)
        if what == "workers":
            return f"for {after:g} s: {named} started, and did not call @elastic.run yet"
        short = f"{there} of {counted(need, 'slot has', 'slots have')} an agent"
        here = ", ".join(islice(self.hosts.known, _NAMED)) + ", …" * (
            len(self.hosts.known) > _NAMED
        )
        others = f"only {here} is known, others are expected" if here else "no host is known"
        who = f"missing: {named}" if named else others
        why = f"; {self.settings.expects}" if self.settings.expects else ""
        return f"for {after:g} s: {short}; {who}{why}"

    def _missing_hosts(self) -> Iterator[str]:
        """Yield each host that has no agent, and why."""
        for host in self.hosts.known.values():
            if not self.fleet.is_ready(host.name):
                kept = self.hosts.hindrance(host.name)
                why = "its agent starts" if kept is None else f"{kept.value}: {host.reason}"
                yield f"{host.name} ({why.rstrip(': ')})"

    def _missing_workers(self) -> Iterator[str]:
        """Yield the workers that were started and are not ready, as far as they are named."""
        if self.outcome.kind.value != "plain":
            yield from islice((w.id for w in self.workers.having(STARTING) if w.pid), _NAMED + 1)
