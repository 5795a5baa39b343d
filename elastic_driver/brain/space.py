"""Which hosts have space for the workers of which job.

With limits that differ from job to job (`limits`), some workers fit if the maximum flow from jobs
through hosts is as large as their number. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

from elastic_driver.brain.algorithm import HostView, JobView
from elastic_driver.brain.limits import firm_limits, wishes

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
        self._firm, self._wishes = firm or {}, wishes or {}
        self._fewer = {
            job: self._below_slots(self._firm.get(job, {}), self._wishes.get(job, {}))
            for job in self._firm.keys() | self._wishes.keys()
        }

    def _below_slots(self, *limits: Mapping[str, int]) -> dict[str, int]:
        """Return the limits that are below the slots of their host."""
        found: dict[str, int] = {}
        for each in limits:
            for host, most in each.items():
                if most < found.get(host, self.slots.get(host, 0)):
                    found[host] = most
        return found

    def of(self, job: str) -> dict[str, int]:
        """Return the slots of each host that a job may use."""
        return self.slots | self._fewer.get(job, {})

    def is_limited(self, *jobs: str) -> bool:
        """Return whether one of these jobs may not use all slots."""
        return any(self._fewer.get(job) for job in jobs)

    def give_up_wishes(self, job: str) -> None:
        """Let a job use all slots that its firm limits leave."""
        firm = self._below_slots(self._firm.get(job, {}))
        if self._fewer.get(job, {}) != firm:
            self._fewer[job] = firm
            self.given_up.add(job)

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
    return Space(
        {host.name: host.slots for host in hosts},
        firm={job.name: firm_limits(job, hosts) for job in jobs},
        wishes={job.name: wishes(job, hosts) for job in jobs},
    )
