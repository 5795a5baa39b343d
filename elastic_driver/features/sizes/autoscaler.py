"""The machine that finds the number of workers for one job (`--auto-scale`).

About once a second the driver says how far the job is (`SpeedSeen`). Once the step time of a size
is known (`gauge`), the search (`search`) names the next one, which becomes an event for the job.
What similar jobs have measured (`PriorFound`) stands for sizes that were not tried, as long as it
fits what is measured. After the search the machine watches for a change of the step time, and for
hosts that come and go. While a size that a user asked for holds, it proposes nothing. Pure. Times
are seconds.
"""

from dataclasses import replace
from math import inf
from typing import TypeAlias

from elastic_driver.features.sizes.gauge import DRIFT, Gauge, efficiency
from elastic_driver.features.sizes.messages import WRONG, PriorFound, SpeedSeen
from elastic_driver.features.sizes.search import CLOSE, Layout, Proposal, Search
from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import MemoryExpected, SizeProposed, Tick
from elastic_driver.kernel.services import SendEvent
from elastic_driver.words import log_events as log

REPAYS = 10  # a move has to save this many times what it costs
HORIZON_S = 600.0  # how long a job goes on at least, if it does not say how many steps it has
NOISE_LOOKS = 50  # over about so many looks the scale of the gradients' noise is a mean
NOISE_STEP = 0.02  # a smaller change of what a sample teaches does not count
GIVE_UP_S = 120.0  # a size that the job does not reach for this long is not tried again


Decided: TypeAlias = SendEvent | Announce


class AutoScaler:
    """Searches the best size, goes there, and watches whether it stays the best."""

    def __init__(self) -> None:
        self.search: Search | None = None  # None: it begins with the next look
        self.found = 0.0  # the step time at the best size; 0: the search goes on
        self._round = 0
        self._gauge = Gauge()
        self._began: float | None = None  # the first look
        self._asked_at: float | None = None  # when the size was proposed that the job goes to
        self._last: tuple[SpeedSeen, float] | None = None  # the last look, and the step time then
        self._costs: list[float] = []  # seconds that each move has cost
        self._unreachable: set[int] = set()
        self._times: dict[tuple[int, int], float] = {}  # step times, by size and hosts
        self._noise_seen: float | None = None  # the scale of the gradients' noise, a mean
        self._noise_looks = 0
        self._noise: float | None = None  # the same, as the search weighs it
        self._prior: dict[tuple[int, int], float] = {}  # the same of similar jobs
        self._similar = 0  # how many jobs those are

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: SpeedSeen | PriorFound | Tick, now: float) -> list[Decided]:
        """Take in how far the job is; propose a size, or nothing."""
        if isinstance(event, PriorFound) and not self.found:
            self._similar = event.jobs
            self._prior = {(size, hosts): took for size, hosts, took in event.step_times}
        if not isinstance(event, SpeedSeen):
            return []
        self._began = now if self._began is None else self._began
        if event.held:
            self.search, self.found, self._asked_at = None, 0.0, None
            return []
        heard = event.noise is not None and self._hear_noise(event.noise, sum(event.slots))
        layout = self._layout(event)
        if not layout.hosts:
            return []
        if heard and self.search is not None and not self.found:
            self.search.weigh_anew(replace(self.search.layout, noise=self._noise))
        if self.search is None or self.search.layout != layout:
            known = {
                n: layout.work(n) / t
                for (n, h), t in self._times.items()
                if layout.hosts.get(n) == h
            }
            self.search, self.found = Search(layout, known), 0.0
        if event.size != event.wanted:
            return self._on_the_way(event, self.search, now)
        self._asked_at = None
        if self._prior and not self.search.moves and not self.search.rates:
            self._prior = self._of_layout(layout)
            if begin := self._begin_where_similar_jobs_were_best(event, self.search, now):
                return begin
        if event.round != self._round:
            self._enter(event)
        self._gauge.take(event.steps, event.at)
        self._last = event, self._gauge.mean
        return self._settle(event, self.search, now)

    def deadline(self) -> float | None:
        """See `Machine.deadline`: this machine only acts when it is told how far the job is."""
        return None

    def check(self) -> list[str]:
        """See `Machine.check`."""
        return [f"a move cost {cost} s" for cost in self._costs if cost < 0]

    # ---- what is allowed -----------------------------------------------------------------

    def _layout(self, event: SpeedSeen) -> Layout:
        """Return the sizes that the job may have now, with the hosts they need."""
        capacity = sum(event.slots)
        most = capacity if event.most is None else min(event.most, capacity)
        hosts, size = {}, 0
        for number, slots in enumerate(event.slots, start=1):
            for _slot in range(slots):
                size += 1
                fits = number % event.unit == 0 and event.least <= size <= most
                if fits and size not in self._unreachable:
                    hosts[size] = number
        return Layout(hosts, event.micro_batches, self._noise)

    def _hear_noise(self, noise: float, most: int) -> bool:
        """Take in the scale of the gradients' noise; return whether it counts anew from now on.

        It grows while a job trains. It counts anew when it changes what a sample teaches with the
        most workers; a search that is over begins again then.
        """
        self._noise_looks = min(self._noise_looks + 1, NOISE_LOOKS)
        before = noise if self._noise_seen is None else self._noise_seen
        self._noise_seen = before * (noise / before) ** (1 / self._noise_looks)
        if self._noise is not None:
            change = efficiency(self._noise_seen, most) / efficiency(self._noise, most)
            if abs(change - 1) <= (DRIFT if self.found else NOISE_STEP):
                return False
        self._noise = self._noise_seen
        return True

    # ---- on the way to a size ------------------------------------------------------------

    def _on_the_way(self, event: SpeedSeen, search: Search, now: float) -> list[Decided]:
        if self._asked_at is None:
            self._asked_at = now  # another cause: a worker is lost, or a host has gone
        late = now - self._asked_at >= GIVE_UP_S
        if not late or event.wanted is None or self.found or not search.rates:
            return []
        self._unreachable.add(event.wanted)
        search.layout = self._layout(event)
        self._asked_at = now
        why = f"size {event.wanted} could not be had within {GIVE_UP_S:g} s"
        best = search.winner()
        search.moves += 1
        return [SendEvent(SizeProposed(best, why), why)]

    def _enter(self, event: SpeedSeen) -> None:
        """Begin to measure a new round; note what the move cost."""
        if self._last is not None and self.search is not None and self.search.moves:
            last, step_time = self._last
            if last.worker == event.worker and last.size != event.size and step_time:
                lost = event.at - last.at - (event.steps - last.steps) * step_time
                self._costs = [*self._costs, max(0.0, lost)][-8:]
        self._round, self._gauge = event.round, Gauge()

    # ---- at a size -----------------------------------------------------------------------

    def _settle(self, event: SpeedSeen, search: Search, now: float) -> list[Decided]:
        if self.found:
            if not self._gauge.has_drifted(self.found):
                return []
            was, self.found = self.found, 0.0
            self._times.clear()
            self._prior.clear()
            self._unreachable.clear()
            self.search = search = Search(search.layout)
            reason = f"a step takes {self._gauge.mean:.3g} s, it was {was:.3g} s"
            return [Announce(log.SizeSearchReopened(), reason), *self._move(event, search, now)]
        fastest = max(search.rates.values(), default=0.0)
        worst = search.layout.work(event.size) / (fastest * (2 * CLOSE - 1)) if fastest else inf
        if not self._gauge.is_known(worst):
            return []
        return self._move(event, search, now)

    def _move(self, event: SpeedSeen, search: Search, now: float) -> list[Decided]:
        """Take in the step time of this size, and go on to the next one."""
        said = self._compare_with_similar_jobs(event, search)
        search.measured(event.size, self._gauge.mean, self._gauge.error)
        self._times[event.size, search.layout.hosts.get(event.size, 0)] = self._gauge.mean
        proposal = search.next()
        if not proposal.last and not self._repays(event, now, 1 - CLOSE):
            best = search.winner()
            proposal = Proposal(best, "trying more sizes would not repay itself", last=True)
        if proposal.last:
            gain = 1 - search.rates[event.size] / search.rates[proposal.size]
            if proposal.size != event.size and gain > 0 and not self._repays(event, now, gain):
                why = f"size {event.size} stays: a move would not repay itself"
                proposal = Proposal(event.size, why, last=True)
            self.found = search.layout.work(proposal.size) / search.rates[proposal.size]
            found = log.SizeFound(size=proposal.size, noise=search.layout.noise)
            said = [*said, Announce(found, proposal.reason)]
        if proposal.size == event.size:
            return [*said]
        search.moves += 1
        self._asked_at = now
        return [*said, SendEvent(SizeProposed(proposal.size, proposal.reason), proposal.reason)]

    # ---- similar jobs --------------------------------------------------------------------

    def _of_layout(self, layout: Layout) -> dict[tuple[int, int], float]:
        """Return what similar jobs have measured at the sizes that this job may have now."""
        return {(n, h): t for (n, h), t in self._prior.items() if layout.hosts.get(n) == h}

    def _begin_where_similar_jobs_were_best(
        self, event: SpeedSeen, search: Search, now: float
    ) -> list[Decided]:
        if not self._prior:
            return []
        layout = search.layout
        rates = {n: layout.work(n) / t for (n, _h), t in self._prior.items()}
        size = Search(layout, rates).winner()
        if size == event.size:
            return []
        why = f"size {size} was best in similar jobs ({self._similar} of them)"
        search.moves += 1
        self._asked_at = now
        return [SendEvent(SizeProposed(size, why), why)]

    def _compare_with_similar_jobs(self, event: SpeedSeen, search: Search) -> list[Decided]:
        """Compare this size with theirs; take over their other sizes, or forget them all."""
        layout, measured = search.layout, self._gauge.mean
        theirs = self._prior.get((event.size, layout.hosts.get(event.size, 0)))
        if theirs is None:
            return []
        ratio, prior, self._prior = measured / theirs, self._of_layout(layout), {}
        if abs(ratio - 1) > WRONG:
            why = f"a step at size {event.size} takes {measured:.3g} s, it took {theirs:.3g} s"
            return [Announce(log.PriorDropped(), why), SendEvent(MemoryExpected(0, why), why)]
        for (size, _hosts), took in prior.items():
            search.rates.setdefault(size, layout.work(size) / (took * ratio))
        return []

    def _repays(self, event: SpeedSeen, now: float, gain: float) -> bool:
        """Return whether a move that makes the job faster by this share repays itself."""
        cost = max(self._costs, default=0.0)
        if event.rest is not None:
            horizon = event.rest * self._gauge.mean
        else:
            horizon = max(HORIZON_S, now - (self._began or now))
        return horizon * gain >= REPAYS * cost
