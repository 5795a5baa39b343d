"""Notices to hosts and workers, and the short wait for those of the others.

A batch system or a service manager that ends a job sends a signal to all of its processes: to
`elasticrun`, the agents, the workers. They get it and report it in any order, on several machines
seconds apart. If each notice were acted upon at once, the world would shrink and form anew several
times before the last one is there, and what remains would train on with other batches. So an
elastic job trains on for `notice_spread` seconds after the first notice (less if there is little
time), starts nothing and forms no round meanwhile. As soon as all hosts have their notice, or the
job has one itself, nothing more is awaited. Times are monotonic seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.rules.drain import Drains
from elastic_driver.core.rules.hosts import Drain
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait

SPREAD_SHARE = 0.25  # of the time that the first notice gives


@dataclass(slots=True)
class Notices(Rule):
    """Holds notices until those of the others may have come, then hands them to `Drains`."""

    drains: Drains
    _hosts: dict[str, Drain] = saved(factory=dict, name="hosts")  # their notices that are held
    _workers: dict[str, Drain] = saved(factory=dict, name="workers")
    _until: float = saved(math.inf, name="until")

    @property
    def gathering(self) -> bool:
        """Whether more notices are awaited, so that the world is to stay as it is."""
        return bool(self._hosts or self._workers) and self.outcome.departure is None

    def on_host_leaving(self, event: ev.HostLeaving, now: float) -> None:
        """Take in the notice of an agent's host."""
        self.fleet.current(event)  # an earlier agent's notice is stale
        if event.host in self._hosts:
            raise ev.StaleEvent(f"host {event.host} has said before that it has to go")
        drain = self.drains.drain_for(event, now)
        if self._is_held(event.deadline, now):
            self._hosts[event.host] = drain
        elif not self.drains.drain(event.host, drain):
            raise ev.StaleEvent(f"host {event.host} is not there, or is drained already")

    def on_worker_leaving(self, event: ev.WorkerLeaving, now: float) -> None:
        """Take in the notice of a single worker."""
        if event.worker in self._workers:
            raise ev.StaleEvent(f"{event.worker} has said before that it has to go")
        self.drains.check_worker(event)
        drain = self.drains.drain_for(event, now)
        if self._is_held(event.deadline, now):
            self._workers[event.worker] = drain
        else:
            self.drains.drain_worker(event.worker, drain, event.deadline)

    def _is_held(self, deadline: float, now: float) -> bool:
        """Return whether to wait for the notices of others; the first one begins the wait."""
        spread = min(self.settings.notice_spread, deadline * SPREAD_SHARE)
        if not spread or not self.outcome.elastic or self.outcome.finishing:
            return False
        if not self._hosts and not self._workers:
            self._until = now + spread
        return True

    def advance(self, now: float) -> Iterable[Wait]:
        """Hand the notices on when there is no reason to wait any longer."""
        if not self._hosts and not self._workers:
            return
        wait = Wait(self._until, "a notice may be one of many")
        told = all(name in self._hosts or self.hosts.drain_of(name) for name in self.hosts.known)
        if told or not self.gathering or self.outcome.finishing or wait.is_over(now):
            self._hand_on(now)
        else:
            yield wait

    def _hand_on(self, now: float) -> None:
        hosts, self._hosts = self._hosts, {}
        workers, self._workers = self._workers, {}
        for host, drain in hosts.items():
            self.drains.drain(host, drain)
        for worker, drain in workers.items():
            self.drains.drain_worker(worker, drain, (drain.leave_by or now) - now)

    def end_by(self, latest: float) -> float:
        """Return when the first host or worker with a notice is stopped, at the latest `latest`."""
        drains = [*self._hosts.values(), *self._workers.values()]
        drains += filter(None, map(self.hosts.drain_of, self.hosts.known))
        return min([latest, *(drain.leave_by for drain in drains if drain.leave_by is not None)])
