"""The room that keys take in the store: in all, those of users, and those of each client. Pure.

A key belongs to the client that has written it last; keys of the driver belong to nobody. Sizes
are bytes, with `KEY_BYTES` for each key besides its text and value.
"""

from collections.abc import Callable, Hashable

from rendezvous.limits import KEY_BYTES, Limits

Owner = Hashable  # None: the driver, for which no bounds hold
_NOTHING = (0, 0)


class StoreSpace:
    """The bytes and keys in a store.

    Keys that begin with one of `system` are the job's own; all others are users'. `is_of_crowd`
    tells the owners, such as workers, that leave an eighth of all to the others.
    """

    def __init__(
        self,
        system: tuple[str, ...] = (),
        is_of_crowd: Callable[[Owner], bool] = lambda _owner: False,
    ) -> None:
        self._system, self._is_of_crowd = system, is_of_crowd
        self.bytes = self.keys = 0
        self._users_bytes = self._users_keys = 0
        self._owners: dict[str, Owner] = {}
        self._held: dict[Owner, tuple[int, int]] = {}  # bytes and keys

    def refuse(
        self, key: str, before: int | None, after: int, owner: Owner, limits: Limits
    ) -> tuple[str, str, str] | None:
        """Return the bound that a write is over, a code and a sentence; None: there is room.

        `before`, `after`: the bytes of the key's value; `before` is None for a new key.
        """
        size = len(key) + after + KEY_BYTES
        new, more = (1, size) if before is None else (0, after - before)
        is_own = self._owners.get(key) == owner
        if more <= 0 and is_own:
            return None
        if owner is not None:
            held, keys = self._held.get(owner, _NOTHING)
            added, added_keys = (more, new) if is_own else (size, 1)
            if held + added > limits.caller_bytes or keys + added_keys > limits.caller_keys:
                return "share", "share_full", "this client has its share of the store; delete keys"
        if more <= 0:
            return None
        most_bytes, most_keys = self._open_to(owner, limits.store_bytes, limits.store_keys)
        if self.bytes + more > most_bytes or self.keys + new > most_keys:
            return "store", "store_full", "the store is full; delete keys, or write smaller values"
        if not key.startswith(self._system):
            held, keys = self._users_bytes, self._users_keys
            most_bytes, most_keys = self._open_to(owner, limits.users_bytes, limits.users_keys)
            if held + more > most_bytes or keys + new > most_keys:
                return "users", "store_full", "users' keys have taken all their room; delete some"
        return None

    def _open_to(self, owner: Owner, size: int, keys: int) -> tuple[int, int]:
        """Return how many of these bytes and keys may be taken before an owner gets no more."""
        if self._is_of_crowd(owner):
            return size - size // 8, keys - keys // 8
        return size, keys

    def put(self, key: str, before: int | None, after: int, owner: Owner) -> None:
        """Record a write; see `refuse`."""
        size, former = len(key) + after + KEY_BYTES, self._owners.get(key)
        new, more = (1, size) if before is None else (0, after - before)
        if not more and former == owner:
            return
        self._add(key, more, new)
        if former is not None:
            self._charge(former, more - size, -1)
        if owner is not None:
            self._owners[key] = owner
            self._charge(owner, size, 1)
        elif former is not None:
            del self._owners[key]

    def drop(self, key: str, value: int) -> None:
        """Record that a key is gone whose value had so many bytes."""
        size = len(key) + value + KEY_BYTES
        self._add(key, -size, -1)
        if (former := self._owners.pop(key, None)) is not None:
            self._charge(former, -size, -1)

    def seal(self, prefix: str, owner: Owner) -> None:
        """Record a sealed prefix, which is kept for ever, as a key without a value would be."""
        size = len(prefix) + KEY_BYTES
        self._add(prefix, size, 0)
        if owner is not None:
            self._charge(owner, size, 1)

    def _add(self, key: str, size: int, keys: int) -> None:
        self.bytes += size
        self.keys += keys
        if not key.startswith(self._system):
            self._users_bytes += size
            self._users_keys += keys

    def _charge(self, owner: Owner, size: int, keys: int) -> None:
        held, count = self._held.get(owner, _NOTHING)
        if count + keys:
            self._held[owner] = held + size, count + keys
        else:
            self._held.pop(owner, None)
