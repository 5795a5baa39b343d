"""`TF_CONFIG`: the TensorFlow task of each worker, and the addresses of the others.

A task is a role (`chief`, `worker`, `ps`, `evaluator`) and an index. `assign` gives the tasks out
each time the members change, and moves as few of them as it can. `TfLayout` keeps them, and each
task's address, from one round to the next. It knows members by host and slot, because these stay
when the processes are started again. Pure: called by `job.placement` and, for clusters that
form over HTTP, by `features.tensorflow.machine`.

The form of TF_CONFIG: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

from msgspec import Struct

from elastic_driver.kernel.tables import saved
from elastic_driver.options import TfRoles

CHIEF, WORKER, PS, EVALUATOR = "chief", "worker", "ps", "evaluator"
WORKERS_ONLY: TfRoles = ((WORKER, None),)
FIRST_FALLBACK_PORT = 29501  # where an agent has no free port left to offer; 29500 is torch's
# A host's name and a slot there.
Where = tuple[str, int]
K = TypeVar("K", bound=Hashable)


class Task(Struct, frozen=True, order=True):
    """One member's part in a TensorFlow cluster."""

    type: str
    index: int


class PortOffer(NamedTuple):
    """An address, and ports that were free, for a member's TensorFlow server."""

    address: str
    ports: tuple[int, ...]


def assign(members: Sequence[K], roles: TfRoles, previous: Mapping[K, Task]) -> dict[K, Task]:
    """Return each member's task.

    A member keeps its task if that still exists. The chief, and worker 0, is the oldest worker: if
    that task is free, the oldest worker takes it. Other free tasks go to members without one, the
    oldest first, in the order of the roles.

    Args:
        members: all that take part, the oldest first.
        roles: (role, number of members); None: all others.
        previous: the tasks before, also of members that have left.
    """
    fixed = sum(count for _, count in roles if count is not None)
    rest = max(0, len(members) - fixed)
    tasks = [Task(role, i) for role, n in roles for i in range(rest if n is None else n)]
    held = {
        before: m for m in members if (before := previous.get(m)) is not None and before in tasks
    }
    _promote(members, tasks, previous, held)
    placed = set(held.values())
    idle = (member for member in members if member not in placed)
    for task in tasks:
        if task not in held and (newcomer := next(idle, None)) is not None:
            held[task] = newcomer
    found = {member: task for task, member in held.items()}
    return {member: found[member] for member in members if member in found}


def _promote(
    members: Sequence[K], tasks: Sequence[Task], previous: Mapping[K, Task], held: dict[Task, K]
) -> None:
    """Give a free chief or worker 0 to the oldest member that was a worker."""
    for lead in (Task(CHIEF, 0), Task(WORKER, 0)):
        if lead not in tasks or lead in held:
            continue
        chief = held.get(Task(CHIEF, 0))
        for member in members:
            before = previous.get(member)
            if before is not None and before.type == WORKER and member != chief:
                if held.get(before) == member:
                    del held[before]
                held[lead] = member
                break


def cluster_of(tasks: Mapping[K, Task], addresses: Mapping[K, str]) -> dict[str, list[str]]:
    """Return the "cluster" of TF_CONFIG: `host:port` by role and index, without evaluators."""
    cluster: dict[str, list[str]] = {}
    for member in sorted(tasks, key=lambda member: tasks[member]):
        role = tasks[member].type
        if role != EVALUATOR:
            cluster.setdefault(role, []).append(addresses[member])
    return cluster


def tf_config(cluster: Mapping[str, Sequence[str]], task: Task) -> str:
    """Return the value of the variable TF_CONFIG."""
    hosts = {role: list(addresses) for role, addresses in cluster.items()}
    return json.dumps({"cluster": hosts, "task": {"type": task.type, "index": task.index}})


@dataclass(slots=True)
class TfLayout:
    """The tasks of a job's slots and their addresses, over all rounds."""

    roles: TfRoles
    _tasks: dict[Where, Task] = saved(factory=dict, name="tasks")  # the oldest member first
    # For which the addresses below were chosen.
    _offers: dict[Where, PortOffer] = saved(factory=dict, name="offers")
    _listening: dict[Where, tuple[str, int]] = saved(factory=dict, name="listening")

    def settle(self, present: Mapping[Where, PortOffer]) -> dict[Where, str]:
        """Return TF_CONFIG of each member of a new round; new members are the youngest.

        A slot keeps its port as long as its agent offers the same ones.
        """
        kept = (where for where, offer in present.items() if self._offers.get(where) == offer)
        self._listening = {where: self._listening[where] for where in kept}
        self._offers = dict(present)
        members = [w for w in self._tasks if w in present]
        members += [w for w in present if w not in self._tasks]
        for where in members:
            if where not in self._listening:
                self._listening[where] = self._choose(present[where])
        tasks = assign(members, self.roles, self._tasks)
        self._tasks = {where: tasks[where] for where in members if where in tasks}
        addresses = {where: _join(*self._listening[where]) for where in members}
        cluster = cluster_of(self._tasks, addresses)
        return {where: tf_config(cluster, task) for where, task in self._tasks.items()}

    def essential(self, where: Where) -> bool:
        """Return whether the training is not over while this slot's task runs.

        Parameter servers and the evaluator run until they are stopped; so do workers that serve
        a chief beside parameter servers (`ParameterServerStrategy`).
        """
        task = self._tasks.get(where)
        if task is None or task.type in (PS, EVALUATOR):
            return False
        roles = {role for role, count in self.roles if count != 0}
        return task.type == CHIEF or not {CHIEF, PS} <= roles

    def _choose(self, offer: PortOffer) -> tuple[str, int]:
        used = {port for address, port in self._listening.values() if address == offer.address}
        ports = chain(offer.ports, range(FIRST_FALLBACK_PORT, 65536))
        return offer.address, next(port for port in ports if port not in used)


def own_port(config: str) -> int | None:
    """Return the port of the task's own server in a TF_CONFIG of ours; None: it has no server."""
    document = json.loads(config)
    task = document["task"]
    servers = document["cluster"].get(task["type"], [])
    return int(servers[task["index"]].rpartition(":")[2]) if task["index"] < len(servers) else None


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
