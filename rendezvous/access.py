"""The rights of tokens: the routes that each role may use, and the keys it may read and write.

`ROUTES` and `KEYS` are the whole of it; docs/security.md shows them. The driver may do everything,
but keys that nobody may write it writes in its own process alone: requests do not, whatever their
token. A route that is not in the table is the driver's alone. The first row of `KEYS` that a key
begins with counts; a key of no row is a user's (`USERS`). `{own}` stands for one name: of the
caller if it is a worker, a node or a job, and of an agent of the caller's host
(`<host>.<incarnation>`) if it is an agent; `{joined}` for a round that the caller is a member of
(`RoundMembers`). To the driver both stand for any.

The server checks with `may_call` and `refused`. Pure.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rendezvous import wire
from rendezvous.auth import Caller, Role
from rendezvous.round_members import RoundMembers

Roles = frozenset[Role]
_OWN, _JOINED, _ROUNDS = "{own}/", "{joined}/", "rounds/"
_FEW = 8
_READ, _WRITE = 0, 1
_MANY = (wire.Get, wire.Watch)
JOB_LEASE_S = (
    30.0  # the longest lease of a job with a Brain: names that nobody uses leave the store
)
_ITSELF = ": the driver does that itself"
NOBODY: Roles = frozenset()  # but the driver; of keys: but the driver itself, without a request
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
LOGIN_PATH, LOGOUT_PATH = "/login", "/logout"
PAGE_FILES = ("/assets/app.css", "/assets/app.js", "/assets/icon.svg")
_PAGE = ("/", LOGIN_PATH, *PAGE_FILES)
# Routes that anyone may use, without a token.
OPEN = frozenset({wire.HEALTH_PATH, "/v1/nodes/hello", "/v1/nodes/proof", *_PAGE})


class RouteRights(NamedTuple):
    """The roles that may use a route, beside the driver."""

    method: str
    path: str
    roles: Roles


class KeyRights(NamedTuple):
    """The roles that may write and read the keys that begin like this, beside the driver."""

    prefix: str
    writers: Roles
    readers: Roles
    holds: str


ROUTES = (
    RouteRights("POST", wire.BATCH_PATH, STORE | NODES | JOBS),
    RouteRights("GET", f"{wire.KV_PREFIX}/{{scope}}/{{key}}", STORE),
    RouteRights("PUT", f"{wire.KV_PREFIX}/{{scope}}/{{key}}", STORE),
    RouteRights("DELETE", f"{wire.KV_PREFIX}/{{scope}}/{{key}}", STORE),
    RouteRights("POST", wire.EVENTS_PATH, MEMBERS | JOBS),
    RouteRights("GET", wire.EVENTS_PATH, WATCHERS),
    RouteRights("GET", "/v1/status", WATCHERS),
    RouteRights("GET", "/v1/history", WATCHERS),
    RouteRights("GET", "/v1/live", WATCHERS),
    RouteRights("POST", LOGOUT_PATH, PEOPLE),
    RouteRights("POST", "/v1/login-codes", OPERATORS),
    RouteRights("GET", "/metrics", WATCHERS),
    RouteRights("GET", "/v1/openapi.json", WATCHERS | AGENTS),
    RouteRights("POST", "/v1/scale", OPERATORS),
    RouteRights("POST", "/v1/plan", OPERATORS),
    RouteRights("POST", "/v1/stop", OPERATORS),
    RouteRights("POST", "/v1/stacks", OPERATORS),
    RouteRights("POST", "/v1/hosts/{host}:drain", OPERATORS),
    RouteRights("POST", "/v1/hosts/{host}:undrain", OPERATORS),
    RouteRights("POST", "/v1/output", AGENTS),
    RouteRights("POST", "/v1/logs", AGENTS),
    RouteRights("GET", "/v1/logs", PEOPLE),
    RouteRights("POST", "/v1/nodes", NODES),
    RouteRights("GET", "/v1/shards/{dataset}", WATCHERS),
    RouteRights("GET", "/v1/shards/{dataset}/checkpoint", TRAINERS),
    RouteRights("PUT", "/v1/shards/{dataset}/checkpoint", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:next", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:done", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:resume", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:agree", TRAINERS),
    RouteRights("POST", "/v1/shards/{dataset}:extend", TRAINERS),
    RouteRights("POST", "/v1/tf/cluster_spec", TRAINERS),
    RouteRights("GET", "/v1/tf/waiting_nodes", TRAINERS),
    RouteRights("POST", "/v1/tf/barrier", TRAINERS),
    RouteRights("POST", "/v1/tf/synchronize", TRAINERS),
)

KEYS = (
    KeyRights(
        "job/", NOBODY, MEMBERS | NODES, "the job's specification, driver, world and notices"
    ),
    KeyRights("agents/{own}/orders/", NOBODY, AGENTS, "orders of the driver to an agent"),
    KeyRights("agents/{own}/", AGENTS, AGENTS, "an agent's lease, heartbeat and usage"),
    KeyRights("workers/{own}/", WORKERS, WORKERS, "a worker's leases and progress"),
    KeyRights("rounds/{joined}/", WORKERS, WORKERS, "the meeting of a round's members"),
    KeyRights(_ROUNDS, NOBODY, WORKERS, "the meetings of rounds in which the caller is not"),
    KeyRights("checks/machines/", WORKERS, WORKERS, "the hosts of a machine"),
    KeyRights("checks/machine_locks/", WORKERS, WORKERS, "locks around measurements"),
    KeyRights("checks/assignments/{own}/", NOBODY, WORKERS, "a process's next task"),
    KeyRights("checks/", NOBODY, MEMBERS, "the specification of a node check"),
    KeyRights("nodes/{own}/", NODES, NODES, "the lease and the orders of a node that has joined"),
    KeyRights("jobs/{own}/grant", NOBODY, JOBS, "the slots that a Brain grants a job"),
    KeyRights("jobs/{own}/lease", JOBS, JOBS, "the lease of a job's driver with a Brain"),
)
USERS = KeyRights("", TRAINERS, TRAINERS, "keys of users")

_ROLES_OF = {(row.method, row.path): row.roles for row in ROUTES}
# All keys but users' begin with one of these.
SYSTEM = tuple(dict.fromkeys(row.prefix.partition("/")[0] + "/" for row in KEYS))


def may_call(caller: Caller, method: str, path: str) -> bool:
    """Return whether a caller may use a route; `path` has its names in braces."""
    return caller.role is Role.DRIVER or caller.role in _ROLES_OF.get((method, path), NOBODY)


def refused(
    caller: Caller, operations: Sequence[wire.Operation], rounds: RoundMembers
) -> str | None:
    """Return a sentence about the first operation that the caller may not carry out, or None."""
    rights = _RIGHTS[caller.role]
    if rights is None:
        return _refused_to_driver(operations)
    for operation in operations:
        if isinstance(operation, _MANY):
            wrong = rights.not_readable(caller.subject, operation.keys)
            if wrong is not None:
                return _sentence(caller, "read", wrong)
        elif isinstance(operation, wire.Count):
            if not rights.may_count(caller.subject, operation.prefix):
                return _sentence(caller, "count keys below", operation.prefix)
        elif isinstance(operation, wire.DeletePrefix):
            if not (rights.users[_WRITE] and _is_of_users(operation.prefix)):
                return _sentence(caller, "delete what is below", operation.prefix)
            if operation.seal and caller.role not in SEALERS:
                return _sentence(caller, "seal", operation.prefix)
        elif not rights.allow(caller.subject, operation.key, _WRITE, rounds):
            return _sentence(caller, "write", operation.key)
        elif caller.role is Role.JOB and not _is_bare_lease(operation):
            return f"the lease of a job has no value and lasts {JOB_LEASE_S:g} s at most"
    return None


def _is_bare_lease(operation: wire.Operation) -> bool:
    """Return whether an operation ends or renews a lease, and leaves nothing in the store."""
    if isinstance(operation, wire.Set):
        lease = operation.lease
        return not operation.value and lease is not None and lease <= JOB_LEASE_S
    return isinstance(operation, wire.Delete)


def _refused_to_driver(operations: Sequence[wire.Operation]) -> str | None:
    """Return a sentence about the first write of a key that no request may write, or None."""
    for operation in operations:
        if isinstance(operation, wire.DeletePrefix):
            if _is_nobodys(operation.prefix, and_below=True):
                return f"no request may delete what is below {operation.prefix[:200]!r}{_ITSELF}"
        elif not isinstance(operation, (*_MANY, wire.Count)) and _is_nobodys(operation.key):
            return f"no request may write {operation.key[:200]!r}{_ITSELF}"
    return None


def _is_nobodys(key: str, *, and_below: bool = False) -> bool:
    """Return whether no request may write a key, or, with `and_below`, one that begins with it."""
    for row in KEYS:
        head, brace, rest = row.prefix.partition("{")
        tail = rest.partition("/")[2]
        _owner, slash, under = key[len(head) :].partition("/")
        begins = key.startswith(head)
        if begins and (not brace or (slash and under.startswith(tail))):
            return not row.writers
        may_be_below = (not slash or tail.startswith(under)) if begins else head.startswith(key)
        if and_below and not row.writers and may_be_below:
            return True
    return False


def _sentence(caller: Caller, act: str, key: str) -> str:
    sentence = f"a token of role {caller.role.value} may not {act} {key[:200]!r}"
    if caller.role is Role.WORKER and key.startswith(_ROUNDS):
        return f"{sentence}: {caller.subject} is no member of that round"
    return sentence


class _KeyRights:
    """The rights of one role to keys, arranged by scope: every request looks at some."""

    def __init__(self, role: Role) -> None:
        self._by_host = role is Role.AGENT  # `{own}` is an agent of the caller's host
        self._rows: dict[str, list[tuple[str, str | None, tuple[bool, bool]]]] = {}
        for row in KEYS:
            scope, _, rest = row.prefix.partition("/")
            head, own, tail = rest.partition(_OWN)
            rights = role in row.readers, role in row.writers
            if rest == _JOINED:
                head, own, tail = "", _JOINED, _JOINED
            self._rows.setdefault(scope, []).append((head, tail if own else None, rights))
        self.users = role in USERS.readers, role in USERS.writers

    def allow(self, subject: str, key: str, how: int, rounds: RoundMembers | None = None) -> bool:
        """Return whether a caller of this role may read or write a key.

        Without `rounds` it is a member of none.
        """
        scope, slash, rest = key.partition("/")
        rows = self._rows.get(scope) if slash else None
        if rows is None:
            return self.users[how]
        for head, tail, rights in rows:
            if not rest.startswith(head):
                continue
            if tail is None:
                return rights[how]
            owner, slash, under = rest[len(head) :].partition("/")
            if tail is _JOINED:
                if slash and rounds is not None and rounds.may_write(subject, owner):
                    return rights[how]
            elif under.startswith(tail):
                own = owner.rpartition(".")[0] if self._by_host else owner
                return own == subject and rights[how]
        return False

    def not_readable(self, subject: str, keys: Collection[str]) -> str | None:
        """Return the first of these keys that the caller may not read, or None."""
        if len(keys) > _FEW and all(key.startswith(_ROUNDS) for key in (min(keys), max(keys))):
            keys = (_ROUNDS,)  # all the others are between these two, and begin alike
        for key in keys:
            if not self.allow(subject, key, _READ):
                return key
        return None

    def may_count(self, subject: str, prefix: str) -> bool:
        """Return whether the caller may read all keys that begin like this."""
        if _is_of_users(prefix):
            return self.users[_READ]
        return "/" in prefix and self.allow(subject, prefix, _READ)


def _is_of_users(prefix: str) -> bool:
    """Return whether every key that begins like this is a user's."""
    return not any(prefix.startswith(scope) or scope.startswith(prefix) for scope in SYSTEM)


# None: there is nothing to look at.
_RIGHTS = {role: None if role is Role.DRIVER else _KeyRights(role) for role in Role}
