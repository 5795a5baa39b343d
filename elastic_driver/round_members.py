"""The members of each round, as the driver has published them: they alone write its keys. Pure.

A server asks for each key below `rounds/` (`rights`). The driver's thread writes and the server's
thread reads; each method is one operation on a dict or an attribute.
"""

from collections.abc import Iterable

_NOBODY: frozenset[str] = frozenset()


class RoundMembers:
    """The members of rounds, by the ids of the workers."""

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
        self._world = found = frozenset(members)
        self._members[str(number)] = found

    def seal(self, *numbers: int) -> None:
        """Forget the members of rounds that are over."""
        self._members.update(dict.fromkeys(map(str, numbers)))

    def may_write(self, worker: str, number: str) -> bool:
        """Return whether a worker may write keys of a round, or be told that it is over."""
        members = self._members.get(number, _NOBODY)
        return members is None or worker in members

    def may_speak_for_world(self, worker: str) -> bool:
        """Return whether a worker is a member of the newest world, if one is known."""
        return self._world is None or worker in self._world
