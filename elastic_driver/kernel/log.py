"""Log events: what has happened, in a class for each name. Pure; knows no name of ours.

A class has the event's name as its tag, its fields in the order in which a line of the log has
them, the least level of output that shows it, and its sentence. A field that is None is left out
of the line. When, where and why it has happened stands beside the event.
"""

from enum import IntEnum
from typing import Any, ClassVar, TypeGuard

from msgspec import Struct


class Level(IntEnum):
    """The amount of output: -q, default, -v."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class LogEvent(Struct, frozen=True, kw_only=True, tag_field="event"):
    """What has happened. Its sentence is a format, with fields and places in braces."""

    sentence: ClassVar[str]
    shown_from: ClassVar[Level] = Level.VERBOSE
    is_alarm: ClassVar[bool] = False  # training goes wrong: red on a terminal

    @property
    def name(self) -> str:
        """Return the event's name in the log."""
        return name_of(type(self))

    @property
    def level(self) -> Level:
        """Return the lowest level that shows this event."""
        return self.shown_from

    @property
    def is_loss(self) -> bool:
        """Return whether a worker was lost: its end was not intended."""
        return False

    def facts(self) -> dict[str, Any]:
        """Return the fields that are known, in their order."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: value for name, value in values if value is not None}


def name_of(kind: type[LogEvent]) -> str:
    """Return the name of a class of events in the log."""
    return str(kind.__struct_config__.tag)


def by_name(*modules: object) -> dict[str, type[LogEvent]]:
    """Return the classes of events that these modules define, by their names in the log."""
    found = (value for module in modules for value in vars(module).values())
    return {name_of(kind): kind for kind in found if _is_kind(kind)}


def _is_kind(value: object) -> TypeGuard[type[LogEvent]]:
    """Return whether this is a class with a sentence: bases of others have none."""
    return isinstance(value, type) and issubclass(value, LogEvent) and hasattr(value, "sentence")
