"""The table of what keeps hosts from getting new workers; `hosts` applies it."""

from enum import Enum


class Hindrance(str, Enum):
    """Something that keeps a host from getting workers; a host may have several."""

    COOL_DOWN = "cool-down"
    PAUSING = "pausing"  # a restart there failed fast, and the next one waits for a moment
    DRAINED = "drained"
    UNREACHABLE = "unreachable"  # it is gone; it is probed until it answers
    UNCHECKED = "checking"  # it waits for a node check
    REFUSED = "refused"  # it refuses us or lacks something, and was tried often enough


class HostNews(str, Enum):
    """News of a host."""

    FAILED = "failed"  # its workers, its agent or a node check, beyond the limit
    FAILED_FAST = "failed, needed"  # the same, but the job cannot do without the host
    COOLED_DOWN = "cool-down over"
    LOST = "not reachable"
    ANSWERED = "answers"  # a probe, or it cannot be probed and the start of an agent is tried
    DRAINED = "drain"
    UNDRAINED = "drain cancelled"
    CHECK_DUE = "check due"
    CHECKED = "checked"
    GIVEN_UP = "given up"  # it has refused us again and again
    REMOVED = "removed"  # discovery no longer reports it; this ends no cool-down


_H = HostNews
HOST_TRANSITIONS: dict[Hindrance, dict[HostNews, bool]] = {  # whether the news begins or ends it
    Hindrance.COOL_DOWN: {_H.FAILED: True, _H.COOLED_DOWN: False},
    Hindrance.PAUSING: {_H.FAILED_FAST: True, _H.COOLED_DOWN: False},
    Hindrance.DRAINED: {_H.DRAINED: True, _H.UNDRAINED: False, _H.REMOVED: False},
    Hindrance.UNREACHABLE: {_H.LOST: True, _H.ANSWERED: False, _H.REMOVED: False},
    Hindrance.UNCHECKED: {_H.CHECK_DUE: True, _H.CHECKED: False, _H.REMOVED: False},
    Hindrance.REFUSED: {_H.GIVEN_UP: True, _H.UNDRAINED: False, _H.REMOVED: False},
}
