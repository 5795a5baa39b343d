"""Says whom the job waits for, when it has waited for a while.

A forgotten variable, a host too few or a name that leads nowhere looks like a slow start: nothing
happens until `--start-timeout`. So a wait of a few seconds is announced once in a round, with who
is missing, why the job expects them, and how to say otherwise. Times are monotonic seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from elastic_driver.core.rules.rounds import FORMING, Rule
from elastic_driver.core.rules.workers import STARTING
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import log_events as log

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
