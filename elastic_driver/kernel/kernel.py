"""Runs machines: an event gets a number and the time, is journalled, handled, and acted upon.

    event → number and time → journal → `machine.handle` → decisions → handlers

The driver, the Brain and the simulator have a kernel each, with machines and handlers of their own.
A replay of a journal has the machines alone: it ends with the decisions.
A handler carries out decisions of one type. It chooses nothing, and is called only after the
journal has the event. Times are seconds. Used by one thread.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from elastic_driver.kernel.machine import Declaration, ForMachine, Machine, Reply, stamped

Handler = Callable[[Any], None]


class Record(Protocol):
    """Writes the events of journalled machines down."""

    def note(self, n: int, at: float, machine: str, event: Any) -> None:
        """Note an event with its number and time."""

    def is_written(self) -> bool:
        """Wait until all that was noted is written; False: nothing may act any more."""

    def once_written(self, act: Callable[[], None]) -> None:
        """Call `act` once all that was noted is written, without waiting for it here."""


class Catalog:
    """The machines that a process may run, by their declarations."""

    def __init__(self, declared: Iterable[Declaration]) -> None:
        self._by_name = {each.name: each for each in declared}
        self._hearers: dict[tuple[str, type[Any]], list[str]] = defaultdict(list)
        for each in self._by_name.values():
            for machine, kinds in each.hears.items():
                for kind in kinds:
                    self._hearers[machine, kind].append(each.name)
        self._follows: dict[type[Any], list[Callable[[Any], ForMachine | None]]] = defaultdict(list)
        for each in self._by_name.values():
            for kind, follow in each.follows.items():
                self._follows[kind].append(follow)

    def __getitem__(self, name: str) -> Declaration:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Declaration]:
        return iter(self._by_name.values())

    @property
    def journalled(self) -> list[Declaration]:
        """The machines that a next driver goes on with."""
        return [each for each in self._by_name.values() if each.is_journalled]

    def hearers(self, event: ForMachine) -> Sequence[str]:
        """Return the machines that take in an event before the one that it is for."""
        return self._hearers.get((event.machine, type(event)), ())

    def following(self, decision: Any) -> list[ForMachine]:
        """Return the events for other machines that follow from a decision."""
        found = (follow(decision) for follow in self._follows.get(type(decision), ()))
        return [event for event in found if event is not None]

    def check_handlers(self, handlers: Mapping[type[Any], Handler]) -> None:
        """Raise `TypeError` for a decision without a handler, and for a handler without one.

        A `Reply` has none: the kernel sends replies, after the others, all together.
        """
        decided = {kind for each in self._by_name.values() for kind in each.decision_types()}
        decided.discard(Reply)
        for kinds, problem in (
            (decided - handlers.keys(), "nobody carries out"),
            (handlers.keys() - decided, "no machine decides"),
        ):
            if kinds:
                names = ", ".join(sorted(kind.__name__ for kind in kinds))
                raise TypeError(f"{problem} {names}")


def _batched(declared: Declaration, events: Iterable[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield each event with those that it consists of: neighbours that are handled as one."""
    for together, run in groupby(events, lambda each: isinstance(each, declared.together)):
        found = tuple(run)
        if together:
            yield declared.batch(found), found
        else:
            yield from ((each, (each,)) for each in found)


class Machines:
    """The machines that run, and what they decide. Nothing acts: a replay needs no more."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine[Any, Any]] = {}  # that run, by their names
        self.deadlines: dict[str, float | None] = {}  # of those that have handled an event
        self.events = 0  # the number of the last event: the cause of what follows from it

    def begin(self, name: str, machine: Machine[Any, Any], due: float | None = None) -> None:
        """Run a machine from now on; `due`: its first tick."""
        self.machines[name] = machine
        if due is not None:
            self.deadlines[name] = due

    def end(self, name: str) -> None:
        """Run a machine no longer."""
        del self.machines[name]
        self.deadlines.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Return the machines whose deadline has passed."""
        return [name for name, due in self.deadlines.items() if due is not None and due <= now]

    def handle(self, n: int, at: float, name: str, event: Any) -> list[Any]:
        """Have a machine handle the event of this number and time; return what it decides.

        Each decision has the number as its cause. Raises `LookupError` for a machine that has not
        begun.
        """
        machine = self.machines.get(name)
        if machine is None:
            raise LookupError(f"the machine {name!r} has not begun at event {n}")
        self.events = n
        decisions = machine.handle(event, at)
        self.deadlines[name] = machine.deadline()
        return stamped(decisions, n)


class Kernel(Machines):
    """Runs the machines of a process.

    Args:
        catalog: the machines that may run.
        handlers: by the type of the decisions that they carry out; one for each that a machine
            of the catalog makes.
        clock: returns the time.
        answer: sends replies to whoever has asked.
        followers: by the type of events, what they alone bring about, whatever is decided.
        post: takes the events that follow from decisions (`Declaration.follows`), to be handled
            later; None: they are dropped.

    Raises `TypeError` where decisions and handlers do not fit.
    """

    def __init__(
        self,
        catalog: Catalog,
        handlers: Mapping[type[Any], Handler],
        *,
        clock: Callable[[], float],
        answer: Callable[[list[Reply]], None] | None = None,
        followers: Mapping[type[Any], Handler] | None = None,
        post: Callable[[ForMachine], None] | None = None,
    ) -> None:
        catalog.check_handlers(handlers)
        super().__init__()
        self.catalog, self._handlers, self._followers = catalog, handlers, followers or {}
        self._clock, self._answer, self._post = clock, answer, post
        self.record: Record | None = None  # of the journal; None: there is none (yet)
        self.checks_invariants = False  # after each event
        # Called after an event was handled, with the seconds that it took; it decides nothing.
        self.on_handled: Callable[[str, Any, float], None] = lambda _name, _event, _seconds: None

    def hand_over(self, events: Iterable[ForMachine]) -> None:
        """Hand events to their machines, those that are for one together where it declares so."""
        own: dict[str, list[Any]] = {}
        for each in events:
            for name in self.catalog.hearers(each):
                self.decide(name, each)
            own.setdefault(each.machine, []).append(each)
        for name, found in own.items():
            for event, parts in _batched(self.catalog[name], found):
                self.decide(name, event, parts)

    def decide(self, name: str, event: Any, own: Sequence[Any] = ()) -> None:
        """Number an event, have a machine decide, and carry out what it decides.

        `own`: the events in it that are for this machine, and are followed. A machine that has not
        begun, or is over, decides nothing.
        """
        follows = [(act, each) for each in own if (act := self._followers.get(type(each)))]
        if name not in self.machines:
            for act, each in follows:
                act(each)
            return
        n = self.events + 1
        now = self._clock()
        record = self.record if self.catalog[name].is_journalled else None
        if record is not None:
            record.note(n, now, name, event)
        decided = self.handle(n, now, name, event)
        self.on_handled(name, event, self._clock() - now)
        if self.checks_invariants and (violated := self.machines[name].check()):
            raise AssertionError(f"after {event}: {'; '.join(violated)}")
        acts = [each for each in decided if not isinstance(each, Reply)]
        if (acts or follows) and record is not None and not record.is_written():
            return
        for act, each in follows:
            act(each)
        for each in acts:
            self.act(each)
        if replies := [each for each in decided if isinstance(each, Reply)]:
            self._send(replies, record)

    def act(self, decision: Any) -> None:
        """Carry out one decision; tell the machines for which something follows from it."""
        self._handlers[type(decision)](decision)
        if self._post is not None:
            for event in self.catalog.following(decision):
                self._post(event)

    def _send(self, replies: list[Reply], record: Record | None) -> None:
        answer = self._answer
        if answer is None:
            raise TypeError("a machine replies, and nobody sends its replies")
        if record is None:
            answer(replies)  # all together
        else:
            record.once_written(lambda: answer(replies))
