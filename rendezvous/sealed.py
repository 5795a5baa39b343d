"""The prefixes below which nothing may be written or waited for any more. Pure."""

_USERS, _SYSTEM = 0, 1


class SealedPrefixes:
    """Sealed prefixes. A look at a key costs one lookup for each length that they have.

    Keys that begin with one of `system` are the job's own; prefixes of users cost them nothing. A
    prefix is either longer than one of `system`, or no beginning of any.
    """

    def __init__(self, system: tuple[str, ...] = ()) -> None:
        self._system = system
        self._prefixes: set[str] = set()
        self._lengths: tuple[dict[int, None], dict[int, None]] = ({}, {})

    def __contains__(self, prefix: str) -> bool:
        """Return whether exactly this prefix is sealed."""
        return prefix in self._prefixes

    def add(self, prefix: str) -> None:
        """Seal a prefix."""
        self._prefixes.add(prefix)
        self._lengths[self._kind(prefix)][len(prefix)] = None

    def lengths_with(self, prefix: str) -> int:
        """Return how many lengths there would be to look up with this prefix."""
        lengths = self._lengths[self._kind(prefix)]
        return len(lengths) + (len(prefix) not in lengths)

    def above(self, key: str) -> str | None:
        """Return a sealed prefix that a key begins with, or None."""
        for length in self._lengths[self._kind(key)]:
            if key[:length] in self._prefixes:
                return key[:length]
        return None

    def _kind(self, key: str) -> int:
        return _SYSTEM if key.startswith(self._system) else _USERS
