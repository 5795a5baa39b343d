"""The roles of a job's and a Brain's tokens, and what each role may do with the keys of the store.

An agent makes the tokens of its workers, and the driver of a Brain's job the token of that job. The
name of an owner is the host of an agent, the name of a node, the id of a worker, or the run id of a
job.

`KEYS` has the rights to all keys; who may use a route is in the route's row (`rendezvous.routes`).
docs/security.md shows both, and `rendezvous.access` says how rows are read. A server gets them by
`access_of`. `{own}` in a prefix stands for the name of a worker, a node or a job, and for an agent
of the caller's host (`<host>.<incarnation>`); `{joined}` for a round that the caller is a member of
(`RoundMembers`). Pure.
"""

from collections.abc import Iterable, Sequence

from elastic_driver import contract
from rendezvous.access import (
    NOBODY,
    Access,
    BareLease,
    KeyRights,
    Reason,
    Roles,
    RouteRights,
    Table,
)
from rendezvous.auth import Role, derived_token


def agent_token(driver_token: str, host: str) -> str:
    """Return the token of the agents of this host."""
    return derived_token(driver_token, AGENT, host)


def node_token(driver_token: str, name: str) -> str:
    """Return the token of a node that has joined under this name."""
    return derived_token(driver_token, NODE, name)


def worker_token(agent_token: str, worker: str) -> str:
    """Return the token of a worker, whose id is `<host>.<slot>.<incarnation>`."""
    return derived_token(agent_token, WORKER, worker)


def jobs_token(brain_token: str) -> str:
    """Return the secret that the tokens of all jobs of a Brain are derived from.

    It is no token itself: a server does not take it.
    """
    return derived_token(brain_token, JOB)


def job_token(token: str, job: str) -> str:
    """Return the token of a job; `token`: the Brain's own one, that of all jobs, or this one."""
    if token.startswith(f"{JOB.value}:"):
        of_all = token.startswith(f"{JOB.value}::")
        return derived_token(token, JOB, job) if of_all else token
    return derived_token(jobs_token(token), JOB, job)


def own_token(token: str, host: str) -> str:
    """Return the token of the agent of this host, if need be derived from the driver's.

    A backend may start its agents with either.
    """
    return token if token.startswith(f"{AGENT.value}:") else agent_token(token, host)


AGENT = Role("agent")
WORKER = Role(
    "worker",
    key=lambda token, worker: agent_token(token, contract.host_of_worker(worker)),
    crowd=True,
)
NODE = Role("node")
JOB = Role("job", key=lambda brain_token, _job: jobs_token(brain_token), has_subject=True)
ALL = (AGENT, WORKER, NODE, JOB)  # beside those of each server: driver, operator, reader

# ---- roles that rows of routes and keys name together ------------------------------------

MEMBERS: Roles = frozenset({AGENT, WORKER})
PEOPLE: Roles = frozenset({Role.OPERATOR, Role.READER})
WATCHERS: Roles = PEOPLE | {WORKER}
OPERATORS: Roles = frozenset({Role.OPERATOR})
AGENTS: Roles = frozenset({AGENT})
WORKERS: Roles = frozenset({WORKER})
NODES: Roles = frozenset({NODE})
JOBS: Roles = frozenset({JOB})
TRAINERS: Roles = WORKERS | OPERATORS

# ---- the members of rounds ---------------------------------------------------------------


class RoundMembers:
    """The members of rounds, by the ids of the workers, as the driver has published them.

    They alone write the keys of a round: a server asks for each key below `rounds/`. The driver's
    thread writes and the server's thread reads; each method is one operation on a dict or an
    attribute.
    """

    def __init__(self) -> None:
        # By the number as it stands in keys. None: the round is sealed, and its members may be
        # late; the store tells everybody that it is over.
        self._members: dict[str, frozenset[str] | None] = {}
        self._world: frozenset[str] | None = None

    def admit(self, number: int, members: Iterable[str]) -> None:
        """Let these workers, and no others, write the keys of a round."""
        self._members[str(number)] = frozenset(members)

    def publish(self, number: int, members: Iterable[str]) -> None:
        """Admit the members of the job's newest world."""
        self._world = frozenset(members)
        self._members[str(number)] = self._world

    def seal(self, *numbers: int) -> None:
        """Forget the members of rounds that are over."""
        self._members.update(dict.fromkeys(map(str, numbers)))

    def may_write(self, worker: str, number: str) -> bool:
        """Return whether a worker may write keys of a round, or be told that it is over."""
        members = self._members.get(number, frozenset())
        return members is None or worker in members

    def may_speak_for_world(self, worker: str) -> bool:
        """Return whether a worker is a member of the newest world, if one is known."""
        return self._world is None or worker in self._world


# ---- rights to keys ----------------------------------------------------------------------

# The longest lease of a job with a Brain: names that nobody uses leave the store.
JOB_LEASE_S = 30.0
SEALERS = OPERATORS  # of prefixes of users' keys: they end the keys of others, for ever

KEYS = (
    KeyRights(
        "job/", NOBODY, MEMBERS | NODES, "the job's specification, driver, world and notices"
    ),
    KeyRights("agents/{own}/orders/", NOBODY, AGENTS, "orders of the driver to an agent"),
    KeyRights("agents/{own}/", AGENTS, AGENTS, "an agent's lease, heartbeat and usage"),
    KeyRights("workers/{own}/", WORKERS, WORKERS, "a worker's leases and progress"),
    KeyRights("rounds/{joined}/", WORKERS, WORKERS, "the meeting of a round's members"),
    KeyRights("rounds/", NOBODY, WORKERS, "the meetings of rounds in which the caller is not"),
    KeyRights("checks/machines/", WORKERS, WORKERS, "the hosts of a machine"),
    KeyRights("checks/machine_locks/", WORKERS, WORKERS, "locks around measurements"),
    KeyRights("checks/assignments/{own}/", NOBODY, WORKERS, "a process's next task"),
    KeyRights("checks/", NOBODY, MEMBERS, "the specification of a node check"),
    KeyRights("nodes/{own}/", NODES, NODES, "the lease and the orders of a node that has joined"),
    KeyRights("jobs/{own}/grant", NOBODY, JOBS, "the slots that a Brain grants a job"),
    KeyRights("jobs/{own}/lease", JOBS, JOBS, "the lease of a job's driver with a Brain"),
)
USERS = KeyRights("", TRAINERS, TRAINERS, "keys of users")


def access_of(routes: Sequence[RouteRights], rounds: RoundMembers | None = None) -> Access:
    """Return what a server with these routes checks; `rounds`: who may write which round.

    Without it, no worker is a member of any round.
    """
    table = Table(
        routes=routes,
        keys=KEYS,
        others=USERS,
        roles=ALL,
        login_path=contract.LOGIN_PATH,
        sealers=SEALERS,
        owner_of={AGENT: lambda name: name.rpartition(".")[0]},  # `<host>.<incarnation>` in keys
        bare_leases=(BareLease(JOB, JOB_LEASE_S),),
        reasons=(Reason(WORKER, "rounds/", "is no member of that round"),),
    )
    return Access(table, (RoundMembers() if rounds is None else rounds).may_write)
