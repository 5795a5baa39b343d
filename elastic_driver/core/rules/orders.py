"""Orders to the agents: stop a worker, kill it, or anything else that a rule decides."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_driver.core.decisions import GiveOrder
from elastic_driver.core.documents import Order, StopWorkerOrder
from elastic_driver.core.rules.effects import Effects
from elastic_driver.core.rules.fleet import Fleet
from elastic_driver.core.rules.workers import ACTIVE, Worker, WorkerNews, WorkerStateRegistry
from elastic_driver.settings import Settings


@dataclass(slots=True)
class Orders:
    """Gives orders to agents that are up."""

    settings: Settings
    effects: Effects
    fleet: Fleet
    workers: WorkerStateRegistry

    def give(self, host: str, order: Order, reason: str) -> None:
        """Hand an order to the host's agent, if it has one that is up."""
        agent = self.fleet.agents.get(host)
        if agent is not None and self.fleet.is_ready(host):
            self.effects.decide(GiveOrder(host, agent.incarnation, order, reason))

    def stop(self, worker: Worker, reason: str) -> None:
        """Tell a worker's agent to stop it; its exit is then expected."""
        if self.workers.apply(worker, WorkerNews.TOLD_TO_STOP):
            grace = self.settings.stop_grace
            self.give(worker.host, StopWorkerOrder(worker.id, grace, reason), reason)

    def kill(self, worker: Worker, reason: str) -> None:
        """Have a worker that does not answer any more killed at once."""
        self.give(worker.host, StopWorkerOrder(worker.id, 0.0, reason), reason)

    def stop_all(self, reason: str) -> None:
        """Tell every worker to stop."""
        for worker in self.workers.having(*ACTIVE):
            self.stop(worker, reason)
