"""The rights of the job's and the Brain's tokens: which routes and keys each role may use.

`ROUTES` and `KEYS` are the whole of it; docs/security.md shows them, and `rendezvous.access` says
how rows are read. A server gets the rows by `job_access`. `{own}` in a prefix stands for the name
of a worker, a node or a job, and for an agent of the caller's host (`<host>.<incarnation>`);
`{joined}` for a round that the caller is a member of (`RoundMembers`). Pure.
"""

from elastic_driver import contract
from elastic_driver.round_members import RoundMembers
from rendezvous import wire
from rendezvous.access import (
    NOBODY,
    Access,
    BareLease,
    KeyRights,
    Reason,
    RouteRights,
    Table,
)
from rendezvous.auth import Role

# The longest lease of a job with a Brain: names that nobody uses leave the store.
JOB_LEASE_S = 30.0
MEMBERS = frozenset({Role.AGENT, Role.WORKER})
WATCHERS = frozenset({Role.OPERATOR, Role.READER, Role.WORKER})
PEOPLE = frozenset({Role.OPERATOR, Role.READER})
OPERATORS = frozenset({Role.OPERATOR})
AGENTS = frozenset({Role.AGENT})
WORKERS = frozenset({Role.WORKER})
NODES = frozenset({Role.NODE})
JOBS = frozenset({Role.JOB})
TRAINERS = frozenset({Role.WORKER, Role.OPERATOR})
SEALERS = OPERATORS  # of prefixes of users' keys: they end the keys of others, for ever
STORE = frozenset({Role.AGENT, Role.WORKER, Role.OPERATOR})  # its routes
# The page: its files, and the session that a request begins for its own browser.
PAGE_FILES = ("/assets/app.css", "/assets/app.js", "/assets/icon.svg")
_PAGE = ("/", contract.LOGIN_PATH, *PAGE_FILES)
# Routes that anyone may use, without a token.
OPEN = frozenset({wire.HEALTH_PATH, "/v1/nodes/hello", "/v1/nodes/proof", *_PAGE})

ROUTES = (
    RouteRights("POST", wire.BATCH_PATH, STORE | NODES | JOBS),
    RouteRights("GET", f"{wire.KV_PREFIX}/{{scope}}/{{key}}", STORE),
    RouteRights("PUT", f"{wire.KV_PREFIX}/{{scope}}/{{key}}", STORE),
    RouteRights("DELETE", f"{wire.KV_PREFIX}/{{scope}}/{{key}}", STORE),
    RouteRights("POST", contract.EVENTS_PATH, MEMBERS | JOBS),
    RouteRights("GET", contract.EVENTS_PATH, WATCHERS),
    RouteRights("GET", contract.STATUS_PATH, WATCHERS),
    RouteRights("GET", contract.HISTORY_PATH, WATCHERS),
    RouteRights("GET", contract.LIVE_PATH, WATCHERS),
    RouteRights("POST", contract.LOGOUT_PATH, PEOPLE),
    RouteRights("POST", contract.LOGIN_CODES_PATH, OPERATORS),
    RouteRights("GET", contract.METRICS_PATH, WATCHERS),
    RouteRights("GET", "/v1/openapi.json", WATCHERS | AGENTS),
    RouteRights("POST", contract.SCALE_PATH, OPERATORS),
    RouteRights("POST", contract.PLAN_PATH, OPERATORS),
    RouteRights("POST", contract.STOP_PATH, OPERATORS),
    RouteRights("POST", contract.STACKS_PATH, OPERATORS),
    RouteRights("POST", contract.DRAIN_PATH, OPERATORS),
    RouteRights("POST", contract.UNDRAIN_PATH, OPERATORS),
    RouteRights("POST", contract.OUTPUT_PATH, AGENTS),
    RouteRights("POST", contract.LOGS_PATH, AGENTS),
    RouteRights("GET", contract.LOGS_PATH, PEOPLE),
    RouteRights("POST", "/v1/nodes", NODES),
    RouteRights("GET", "/v1/shards/{dataset}", WATCHERS),
    RouteRights("GET", "/v1/shards/{dataset}/checkpoint", TRAINERS),
    RouteRights("PUT", "/v1/shards/{dataset}/checkpoint", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:next", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:done", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:resume", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:agree", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:extend", TRAINERS),
    RouteRights("POST", contract.TF_CLUSTER_SPEC_PATH, TRAINERS),
    RouteRights("GET", contract.TF_WAITING_NODES_PATH, TRAINERS),
    RouteRights("POST", contract.TF_BARRIER_PATH, TRAINERS),
    RouteRights("POST", contract.TF_SYNCHRONIZE_PATH, TRAINERS),
)

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


TABLE = Table(
    routes=ROUTES,
    keys=KEYS,
    others=USERS,
    open=OPEN,
    login_path=contract.LOGIN_PATH,
    sealers=SEALERS,
    owner_of={Role.AGENT: _host_of_agent},
    bare_leases=(BareLease(Role.JOB, JOB_LEASE_S),),
    reasons=(Reason(Role.WORKER, "rounds/", "is no member of that round"),),
)


def job_access(rounds: RoundMembers | None = None) -> Access:
    """Return what a server of a job or of a Brain checks; `rounds`: who may write which round.

    Without it, no worker is a member of any round.
    """
    return Access(TABLE, (RoundMembers() if rounds is None else rounds).may_write)
