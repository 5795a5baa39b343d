"""The rights of tokens: the routes that each role may use, and the keys it may read and write.

A server gets them as one table of rows (`Table`), and asks `Access` about each request, whichever
way it comes. The driver may do everything, but keys that nobody may write it writes in its own
process alone: requests do not, whatever their token. A route without a row is the driver's alone.
The first row of `Table.keys` that a key begins with counts; for a key of no row `Table.others`
does. In a prefix `{own}` stands for one name: of the caller, or one that belongs to it
(`Table.owner_of`), and `{joined}` for a group that the caller is a member of. To the driver both
stand for any. Pure.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rendezvous import wire
from rendezvous.auth import Caller, Role

Roles = frozenset[Role]
# Whether a caller of this name is a member of the group of that name.
IsMember = Callable[[str, str], bool]
_OWN, _JOINED = "{own}/", "{joined}/"
_BRACES = re.compile(r"\{[^}]*\}")
_PATTERN = re.compile(r"{(\w+):[^}]*}")
_FEW = 8
_READ, _WRITE = 0, 1
_MANY = (wire.Get, wire.Watch)
_ITSELF = ": the driver does that itself"
NOBODY: Roles = frozenset()  # but the driver; of keys: but the driver itself, without a request


@dataclass(frozen=True)
class RouteRights:
    """A route, and the roles that may use it beside the driver; None: everybody, without a token.

    `path` is as the router takes it: a name in braces may have a pattern, `{key:.+}`.
    """

    method: str
    path: str
    roles: Roles | None

    @property
    def template(self) -> str:
        """The path with bare names in braces."""
        return _PATTERN.sub(r"{\1}", self.path)


class KeyRights(NamedTuple):
    """The roles that may write and read the keys that begin like this, beside the driver."""

    prefix: str
    writers: Roles
    readers: Roles
    holds: str


class BareLease(NamedTuple):
    """A role that writes nothing but leases without a value, of `seconds` at most."""

    role: Role
    seconds: float


class Reason(NamedTuple):
    """Why a role is refused keys that begin like this: words that follow the caller's name."""

    role: Role
    prefix: str
    words: str


@dataclass(frozen=True)
class Table:
    """All rights of one server's tokens.

    `roles` are those that the server knows beside driver, operator and reader. `others` has the
    rights to keys without a row. A 401 of `login_path` counts like a request with a wrong token.
    `sealers` may seal what is below a prefix, for ever. `owner_of` gives the caller's name for a
    name in `{own}`, for roles where these differ.
    """

    routes: Sequence[RouteRights]
    keys: Sequence[KeyRights]
    others: KeyRights
    roles: Sequence[Role] = ()
    login_path: str | None = None
    sealers: Roles = NOBODY
    owner_of: Mapping[Role, Callable[[str], str]] = field(default_factory=dict)
    bare_leases: Sequence[BareLease] = ()
    reasons: Sequence[Reason] = ()


class Access:
    """What the callers of one server may do.

    `is_member(caller, group)` is asked for each key with `{joined}` in its row, on the server's
    thread; by default nobody is a member.
    """

    def __init__(
        self,
        table: Table,
        is_member: IsMember = lambda _caller, _group: False,
    ) -> None:
        self._table, self._is_member = table, is_member
        self.roles, self.login_path = table.roles, table.login_path
        # The paths that need no token.
        self.open = frozenset(row.template for row in table.routes if row.roles is None)
        # All keys but those of no row begin with one of these.
        self.system = tuple(dict.fromkeys(row.prefix.partition("/")[0] + "/" for row in table.keys))
        self._roles_of = {(row.method, row.template): row.roles for row in table.routes}
        # The POST routes by their path with nothing in place of a name in braces.
        self._posts = {
            _BRACES.sub("", row.path): row.template for row in table.routes if row.method == "POST"
        }
        # None: there is nothing to look at.
        self._rights = {
            role: None if role is Role.DRIVER else _RoleRights(role, table, self.system)
            for role in (Role.DRIVER, Role.OPERATOR, Role.READER, *table.roles)
        }
        self._longest = {row.role: row.seconds for row in table.bare_leases}

    def may_call(self, caller: Caller, method: str, path: str) -> bool:
        """Return whether a caller may use a route; `path` has its names in braces."""
        if caller.role is Role.DRIVER:
            return True
        roles = self._roles_of.get((method, path), NOBODY)
        return roles is None or caller.role in roles

    def may_post(self, caller: Caller, path: str) -> bool:
        """Return whether a caller may use the POST route of a path as it was requested.

        The route has no name in braces, or one in its last part, such as `/sets/{set}:next`.
        """
        route = self._posts.get(path)
        if route is None:
            folder, _, last = path.rpartition("/")
            _name, colon, verb = last.partition(":")
            route = self._posts.get(f"{folder}/{colon}{verb}", path)
        return self.may_call(caller, "POST", route)

    def refused(self, caller: Caller, operations: Sequence[wire.Operation]) -> str | None:
        """Return a sentence about the first operation that the caller may not carry out."""
        rights = self._rights[caller.role]
        if rights is None:
            return self._refused_to_driver(operations)
        longest = self._longest.get(caller.role)
        for operation in operations:
            if isinstance(operation, _MANY):
                wrong = rights.not_readable(caller.subject, operation.keys)
                if wrong is not None:
                    return self._sentence(caller, "read", wrong)
            elif isinstance(operation, wire.Count):
                if not rights.may_count(caller.subject, operation.prefix):
                    return self._sentence(caller, "count keys below", operation.prefix)
            elif isinstance(operation, wire.DeletePrefix):
                if not rights.may_delete_below(operation.prefix):
                    return self._sentence(caller, "delete what is below", operation.prefix)
                if operation.seal and caller.role not in self._table.sealers:
                    return self._sentence(caller, "seal", operation.prefix)
            elif not rights.allow(caller.subject, operation.key, _WRITE, self._is_member):
                return self._sentence(caller, "write", operation.key)
            elif longest is not None and not _is_bare_lease(operation, longest):
                role = caller.role.value
                return f"the lease of a {role} has no value and lasts {longest:g} s at most"
        return None

    def _refused_to_driver(self, operations: Sequence[wire.Operation]) -> str | None:
        """Return a sentence about the first write of a key that no request may write, or None."""
        for operation in operations:
            if isinstance(operation, wire.DeletePrefix):
                if self._is_nobodys(operation.prefix, and_below=True):
                    shown = operation.prefix[:200]
                    return f"no request may delete what is below {shown!r}{_ITSELF}"
            elif isinstance(operation, (*_MANY, wire.Count)):
                continue
            elif self._is_nobodys(operation.key):
                return f"no request may write {operation.key[:200]!r}{_ITSELF}"
        return None

    def _is_nobodys(self, key: str, *, and_below: bool = False) -> bool:
        """Return whether no request may write a key, or, with `and_below`, one that begins so."""
        for row in self._table.keys:
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

    def _sentence(self, caller: Caller, act: str, key: str) -> str:
        sentence = f"a token of role {caller.role.value} may not {act} {key[:200]!r}"
        for reason in self._table.reasons:
            if caller.role is reason.role and key.startswith(reason.prefix):
                return f"{sentence}: {caller.subject} {reason.words}"
        return sentence


def _is_bare_lease(operation: wire.Operation, longest: float) -> bool:
    """Return whether an operation ends or renews a lease, and leaves nothing in the store."""
    if isinstance(operation, wire.Set):
        lease = operation.lease
        return not operation.value and lease is not None and lease <= longest
    return isinstance(operation, wire.Delete)


class _RoleRights:
    """The rights of one role to keys, arranged by scope: every request looks at some."""

    def __init__(self, role: Role, table: Table, system: Sequence[str]) -> None:
        self._system = system
        self._owner_of = table.owner_of.get(role)  # None: the name in `{own}` is the caller's
        self._rows: dict[str, list[tuple[str, str | None, tuple[bool, bool]]]] = {}
        self._grouped: set[str] = set()  # scopes of groups; members read no more than others
        for row in table.keys:
            scope, _, rest = row.prefix.partition("/")
            head, own, tail = rest.partition(_OWN)
            rights = role in row.readers, role in row.writers
            if rest == _JOINED:
                head, own, tail = "", _JOINED, _JOINED
                self._grouped.add(f"{scope}/")
            self._rows.setdefault(scope, []).append((head, tail if own else None, rights))
        self._others = role in table.others.readers, role in table.others.writers

    def allow(self, subject: str, key: str, how: int, is_member: IsMember | None = None) -> bool:
        """Return whether a caller of this role may read or write a key.

        Without `is_member` it is a member of no group.
        """
        scope, slash, rest = key.partition("/")
        rows = self._rows.get(scope) if slash else None
        if rows is None:
            return self._others[how]
        for head, tail, rights in rows:
            if not rest.startswith(head):
                continue
            if tail is None:
                return rights[how]
            owner, slash, under = rest[len(head) :].partition("/")
            if tail is _JOINED:
                if slash and is_member is not None and is_member(subject, owner):
                    return rights[how]
            elif under.startswith(tail):
                own = owner if self._owner_of is None else self._owner_of(owner)
                return own == subject and rights[how]
        return False

    def not_readable(self, subject: str, keys: Collection[str]) -> str | None:
        """Return the first of these keys that the caller may not read, or None."""
        if len(keys) > _FEW:
            lowest, highest = min(keys), max(keys)
            scope = lowest[: lowest.find("/") + 1]
            if scope in self._grouped and highest.startswith(scope):
                keys = (scope,)  # all the others are between these two, and begin alike
        for key in keys:
            if not self.allow(subject, key, _READ):
                return key
        return None

    def may_count(self, subject: str, prefix: str) -> bool:
        """Return whether the caller may read all keys that begin like this."""
        if self._has_no_row(prefix):
            return self._others[_READ]
        return "/" in prefix and self.allow(subject, prefix, _READ)

    def may_delete_below(self, prefix: str) -> bool:
        """Return whether the caller may delete all keys that begin like this."""
        return self._others[_WRITE] and self._has_no_row(prefix)

    def _has_no_row(self, prefix: str) -> bool:
        """Return whether every key that begins like this is one of no row."""
        return not any(
            prefix.startswith(scope) or scope.startswith(prefix) for scope in self._system
        )
