"""The rights of the job's and the Brain's tokens: which keys of the store each role may use.

`KEYS` is the whole of it; who may use a route is in the route's row (`rendezvous.routes`).
docs/security.md shows both, and `rendezvous.access` says how rows are read. A server gets them by
`access_of`. `{own}` in a prefix stands for the name of a worker, a node or a job, and for an agent
of the caller's host (`<host>.<incarnation>`); `{joined}` for a round that the caller is a member of
(`RoundMembers`). Pure.
"""

from collections.abc import Sequence

from elastic_driver import contract, token_roles
from elastic_driver.round_members import RoundMembers
from elastic_driver.token_roles import AGENTS, JOBS, MEMBERS, NODES, OPERATORS, TRAINERS, WORKERS
from rendezvous.access import NOBODY, Access, BareLease, KeyRights, Reason, RouteRights, Table

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


def _host_of_agent(name: str) -> str:
    """Return the host of `<host>.<incarnation>`, as it stands in keys."""
    return name.rpartition(".")[0]


def access_of(routes: Sequence[RouteRights], rounds: RoundMembers | None = None) -> Access:
    """Return what a server with these routes checks; `rounds`: who may write which round.

    Without it, no worker is a member of any round.
    """
    table = Table(
        routes=routes,
        keys=KEYS,
        others=USERS,
        roles=token_roles.ALL,
        login_path=contract.LOGIN_PATH,
        sealers=SEALERS,
        owner_of={token_roles.AGENT: _host_of_agent},
        bare_leases=(BareLease(token_roles.JOB, JOB_LEASE_S),),
        reasons=(Reason(token_roles.WORKER, "rounds/", "is no member of that round"),),
    )
    return Access(table, (RoundMembers() if rounds is None else rounds).may_write)
