"""Bounded room of one kind, such as places for streams: a share for each client, and a reserve.

One client (a token, or a session of a browser) gets a quarter at most. Machines (agents, workers,
nodes, jobs, tokens of readers, and all strangers together) leave an eighth to people; sessions of
readers leave half of that to those who steer the job. The driver's own token has the whole. Pure.
"""

from rendezvous.auth import Caller, Role
from rendezvous.space import Owner

_STEERING = (Role.DRIVER, Role.OPERATOR)


def is_person(caller: Caller) -> bool:
    """Return whether a client steers the job, or looks at it in a browser."""
    return caller.role in _STEERING or (caller.role is Role.READER and caller.subject != "")


def owner_of(caller: Caller) -> Owner:
    """Return the owner of what a caller writes; the driver's keys count for nobody."""
    return None if caller.role is Role.DRIVER else caller


def share_of(caller: Caller | None, room: int) -> int:
    """Return how much of a room one client may have; None: all strangers together."""
    return room if caller is not None and caller.role is Role.DRIVER else max(1, room // 4)


def open_to(caller: Caller | None, room: int) -> int:
    """Return how much of a room may be taken by all, before this client gets no more of it."""
    if caller is not None and caller.role in _STEERING:
        return room
    reserve = room // 16 if caller is not None and is_person(caller) else room // 8
    return max(1, room - reserve)


class Shares:
    """The room that clients have taken."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.taken = 0
        self._taken_by: dict[Caller | None, int] = {}
        # What any client may have, and what is open to all: most requests are within both.
        self._any_share, self._any_open = share_of(None, room), open_to(None, room)

    def take(self, caller: Caller | None, amount: int = 1) -> bool:
        """Take some room for a client; return False if it has its share, or too little is left."""
        if not self.has_room(caller, amount):
            return False
        self.taken += amount
        self._taken_by[caller] = self._taken_by.get(caller, 0) + amount
        return True

    def has_room(self, caller: Caller | None, amount: int = 1) -> bool:
        """Return whether a client may take so much."""
        own, taken = self._taken_by.get(caller, 0) + amount, self.taken + amount
        if own <= self._any_share and taken <= self._any_open:
            return True
        return own <= share_of(caller, self._room) and taken <= open_to(caller, self._room)

    def give_back(self, caller: Caller | None, amount: int = 1) -> None:
        """Give back room that a client has taken."""
        self.taken -= amount
        left = self._taken_by[caller] - amount
        if left:
            self._taken_by[caller] = left
        else:
            del self._taken_by[caller]
