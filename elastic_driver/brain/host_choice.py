"""Which hosts have space for the workers of which job, and where the workers go.

`Space`: with limits that differ from job to job, some workers fit if the maximum flow from jobs
through hosts is as large as their number.

`place`, once the number of each job's workers is decided, has three aims, each before the next: the
fewest workers move; the jobs take the fewest hosts, each job counted by itself; the fewest jobs of
several hosts meet on a host, because their exchanges would slow each other down. Each is an integer
linear program, and its result is a condition of the next. The results are exact, except where a
program needs more branches than `EFFORT` allows, which takes dozens of new jobs at a time: then it
is the best placement found until then.

Pure; the same input gives the same placement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

from elastic_driver.arithmetic import lowered
from elastic_driver.brain.algorithm import HostView, JobView, firm_slots, wished_slots

Sizes = Mapping[str, int]  # the number of workers of each job


class Space:
    """The slots of each host, and of them those that single jobs may use, where these are fewer.

    `firm` and `wishes` have the most workers of a job by host; wishes can be given up.
    """

    def __init__(
        self,
        slots: Mapping[str, int],
        firm: Mapping[str, Mapping[str, int]] | None = None,
        wishes: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.slots = dict(slots)
        self.given_up: set[str] = set()  # jobs whose wishes do not count
        self._firm = {job: lowered(slots, limits) for job, limits in (firm or {}).items()}
        self._usable = self._firm | {
            job: lowered(self._firm.get(job, slots), limits)
            for job, limits in (wishes or {}).items()
        }
        self._limited = {job for job, usable in self._usable.items() if usable != self.slots}

    def of(self, job: str) -> Mapping[str, int]:
        """Return the slots of each host that a job may use."""
        return self._usable.get(job, self.slots)

    def is_limited(self, *jobs: str) -> bool:
        """Return whether one of these jobs may not use all slots."""
        return not self._limited.isdisjoint(jobs)

    def give_up_wishes(self, job: str) -> None:
        """Let a job use all slots that its firm limits leave."""
        firm = self._firm.get(job, self.slots)
        if self.of(job) != firm:
            self._usable[job] = firm
            self.given_up.add(job)
            if firm == self.slots:
                self._limited.discard(job)

    # ---- what fits -----------------------------------------------------------------------

    def crowd(self, sizes: Sizes) -> set[str]:
        """Return jobs that lack space beside each other; none: all workers fit.

        At least one of them has to have fewer workers; that other jobs have fewer does not help.
        """
        wanted = {job: size for job, size in sizes.items() if size}
        if not self.is_limited(*wanted):
            return set(wanted) if sum(wanted.values()) > sum(self.slots.values()) else set()
        graph, flow = self._flow(wanted)
        left = csr_array(graph - flow)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        return {job for number, job in enumerate(wanted, start=1) if number in reached}

    def fits(self, sizes: Sizes) -> bool:
        """Return whether there is space for so many workers of each job."""
        return not self.crowd(sizes)

    def most(self, job: str, sizes: Sizes, least: int, most: int) -> int:
        """Return the most workers, from `least` to `most`, that a job can have beside others."""
        while most > least and not self.fits({**sizes, job: most}):
            most -= 1
        return most

    def somewhere(self, sizes: Sizes) -> dict[str, dict[str, int]]:
        """Return any placement of workers that fit."""
        wanted = {job: size for job, size in sizes.items() if size}
        _, flow = self._flow(wanted)
        first = 1 + len(wanted)
        found: dict[str, dict[str, int]] = {}
        for number, job in enumerate(wanted, start=1):
            row = flow[[number], first : first + len(self.slots)].toarray()[0].tolist()
            found[job] = {host: n for host, n in zip(self.slots, row, strict=True) if n > 0}
        return found

    def _flow(self, sizes: Sizes) -> tuple[csr_array, csr_array]:
        """Return the graph of jobs and hosts with its capacities, and a maximum flow in it.

        Node 0 is the source; then come the jobs, the hosts, and the sink.
        """
        first, sink = 1 + len(sizes), 1 + len(sizes) + len(self.slots)
        jobs: Any = np.arange(1, first)
        hosts: Any = np.arange(first, sink)
        begins: Any = (0 * jobs, np.repeat(jobs, len(hosts)), hosts)
        ends = (jobs, np.tile(hosts, len(jobs)), 0 * hosts + sink)
        through = [most for job in sizes for most in self.of(job).values()]
        capacities = np.array([*sizes.values(), *through, *self.slots.values()], dtype=np.int32)
        where = np.concatenate(begins), np.concatenate(ends)
        graph = csr_array((capacities, where), shape=(sink + 1, sink + 1))
        return graph, maximum_flow(graph, 0, sink).flow


def space_of(jobs: Sequence[JobView], hosts: Sequence[HostView]) -> Space:
    """Return the space of these hosts for these jobs."""
    slots = {host.name: host.slots for host in hosts}
    return Space(
        slots,
        firm={job.name: firm_slots(job, hosts, slots) for job in jobs},
        wishes={job.name: wished_slots(job, hosts, slots) for job in jobs},
    )


EFFORT = 200_000  # of one program: branches, times its variables
LEAST_BRANCHES = 20

Placement: TypeAlias = Mapping[str, Mapping[str, int]]  # workers by job and host, none of them 0
_Terms: TypeAlias = dict[int, float]  # the factor of each variable, by its index


@dataclass(frozen=True)
class _Row:
    """One condition: the sum of the terms is between `low` and `high`."""

    terms: _Terms
    low: float
    high: float


def place(sizes: Mapping[str, int], space: Space, now: Placement) -> Placement:
    """Return where the workers of each job are to be.

    Args:
        sizes: the workers of each job; 0 for one that waits.
        space: the slots of each usable host, and what limits single jobs there.
        now: where workers are; also on hosts that are lost, or of jobs that have ended.

    Raises ValueError if there are more workers than slots for them.
    """
    wanted = {job: size for job, size in sizes.items() if size}
    _require_space(wanted, space)
    return _Program(wanted, space, now).solved() if wanted else {}


def place_quickly(sizes: Mapping[str, int], space: Space, now: Placement) -> Placement:
    """Return where the workers of each job are to be, in any number of jobs and hosts.

    The fewest workers move here, too. The rest is a rule of thumb: a job that shrinks leaves the
    hosts where it has the fewest; one that grows stays together, on the smallest host that is
    large enough. If limits of single jobs leave no slots for the last ones that way, workers go
    anywhere. The arguments are those of `place`.
    """
    _require_space(sizes, space)
    free = dict(space.slots)
    placement: dict[str, dict[str, int]] = {job: {} for job in sizes}
    for job, size in sizes.items():
        at, most = placement[job], space.of(job)
        mine = {host: min(n, most[host]) for host, n in now.get(job, {}).items() if host in most}
        for host in sorted(mine, key=lambda host: -mine[host]):
            if kept := min(mine[host], free[host], size - sum(at.values())):
                at[host] = kept
                free[host] -= kept
    limited_first = sorted(
        sizes,
        key=lambda job: (not space.is_limited(job), sum(placement[job].values()) - sizes[job]),
    )
    for job in limited_first:
        at, most = placement[job], space.of(job)
        while missing := sizes[job] - sum(at.values()):
            room = {host: min(n, most[host] - at.get(host, 0)) for host, n in free.items()}
            host = max(room, key=lambda h: (h in at and room[h] > 0, _fit(room[h], missing)))
            if not (taken := min(missing, room[host])):
                return space.somewhere(sizes)
            at[host] = at.get(host, 0) + taken
            free[host] -= taken
    return {job: at for job, at in placement.items() if at}


def _require_space(sizes: Mapping[str, int], space: Space) -> None:
    if not space.fits(sizes):
        wanted, slots = sum(sizes.values()), sum(space.slots.values())
        raise ValueError(f"{wanted} workers do not fit into {slots} slots")


def _fit(free: int, missing: int) -> tuple[bool, int]:
    """Return how well a host with so many free slots fits: enough is best, then the fewest."""
    return (True, -free) if free >= missing else (False, free)


class _Program:
    """The integer linear program.

    Its variables, for job j and host h: `at` workers of j on h, `kept` those of them that are there
    already, `uses` whether there are any, `wide` whether j has several hosts, `meets` whether j is
    wide and uses h, `crowd` the number of wide jobs on h beyond the first.
    """

    def __init__(self, sizes: Mapping[str, int], space: Space, now: Placement) -> None:
        self._sizes, self._hosts = sizes, space.slots
        self._low: list[float] = []
        self._high: list[float] = []
        self._rows: list[_Row] = []
        self._pairs = list(product(sizes, self._hosts))
        limits = {job: space.of(job) for job in sizes}
        most = {(j, h): min(sizes[j], limits[j][h]) for j, h in self._pairs}
        self._at = {pair: self._variable(most[pair]) for pair in self._pairs}
        self._kept = {
            (j, h): self._variable(min(most[j, h], now.get(j, {}).get(h, 0)))
            for j, h in self._pairs
        }
        self._uses = {pair: self._variable(1) for pair in self._pairs}
        self._require_places(most)

    def solved(self) -> Placement:
        """Return the best placement."""
        moves = dict.fromkeys(self._kept.values(), -1.0)
        found = self._least(moves)
        if found is None:
            raise RuntimeError("workers that fit into the slots could not be placed")
        for aim in (self._hosts_taken(), self._crowds()):
            better = self._least(aim)
            if better is None:
                break
            found = better
        placement: dict[str, dict[str, int]] = {job: {} for job in self._sizes}
        for (job, host), index in self._at.items():
            if workers := round(float(found[index])):
                placement[job][host] = workers
        return placement

    # ---- conditions ----------------------------------------------------------------------

    def _variable(self, most: float) -> int:
        self._low.append(0.0)
        self._high.append(most)
        return len(self._high) - 1

    def _at_most(self, terms: _Terms, high: float) -> None:
        self._rows.append(_Row(terms, -np.inf, high))

    def _require_places(self, most: Mapping[tuple[str, str], int]) -> None:
        for job, size in self._sizes.items():
            there = {self._at[job, host]: 1.0 for host in self._hosts}
            self._rows.append(_Row(there, size, size))
        for host, slots in self._hosts.items():
            self._at_most({self._at[job, host]: 1.0 for job in self._sizes}, slots)
        for pair in self._pairs:
            self._at_most({self._kept[pair]: 1.0, self._at[pair]: -1.0}, 0)
            self._at_most({self._at[pair]: 1.0, self._uses[pair]: -most[pair]}, 0)

    def _hosts_taken(self) -> _Terms:
        return dict.fromkeys(self._uses.values(), 1.0)

    def _crowds(self) -> _Terms:
        """Add the conditions of wide jobs; return what is to be least."""
        wide = {job: self._variable(1) for job in self._sizes}
        meets = {pair: self._variable(1) for pair in self._pairs}
        crowd = {host: self._variable(len(self._sizes)) for host in self._hosts}
        for job in self._sizes:
            used = {self._uses[job, host]: 1.0 for host in self._hosts}
            self._at_most({**used, wide[job]: 1.0 - len(self._hosts)}, 1)
        for (job, host), index in meets.items():
            self._at_most({self._uses[job, host]: 1.0, wide[job]: 1.0, index: -1.0}, 1)
        for host in self._hosts:
            there = {meets[job, host]: 1.0 for job in self._sizes}
            self._at_most({**there, crowd[host]: -1.0}, 1)
        return dict.fromkeys(crowd.values(), 1.0)

    # ---- the solver ----------------------------------------------------------------------

    def _least(self, aim: _Terms) -> Any:
        """Return the variables at which `aim` is least, and keep it there from now on.

        None if nothing was found within `EFFORT`.
        """
        count = len(self._high)
        costs = np.zeros(count)
        costs[list(aim)] = list(aim.values())
        entries = [(n, i, f) for n, row in enumerate(self._rows) for i, f in row.terms.items()]
        numbers, indices, factors = zip(*entries, strict=True)
        matrix = csr_array((factors, (numbers, indices)), shape=(len(self._rows), count))
        low, high = [row.low for row in self._rows], [row.high for row in self._rows]
        branches = max(LEAST_BRANCHES, EFFORT // count)
        result = milp(
            costs,
            integrality=np.ones(count),
            bounds=Bounds(self._low, self._high),
            constraints=LinearConstraint(matrix, low, high),
            options={"node_limit": branches, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        self._at_most(aim, round(float(result.fun)))
        return result.x
