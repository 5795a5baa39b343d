"""An option of `elasticrun`, and the heading of `--help` that it stands under."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import msgspec.structs

from elastic_driver.core.documents import JobSpec
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.runtime.options import DriverOptions
from elastic_driver.settings import Settings
from launcher.options.kinds import ValueKind

T = TypeVar("T")

# The structs whose fields options fill.
FILLED: dict[str, type[msgspec.Struct]] = {
    "settings": Settings,
    "spec": JobSpec,
    "driver": DriverOptions,
    "backend": BackendJob,
}


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: each record is unique
class Option(Generic[T]):
    """One option: its long name, how its value is read, and what it means.

    Attributes:
        name: the long name without dashes, hyphenated; also the key in a configuration file.
        kind: how the value is read.
        default: the value if nobody gives one.
        group: the heading in `--help`.
        help: one or two lines for users.
        aliases: other spellings with their dashes, e.g. `-np`.
        shown: the default in words, if the value itself does not say it.
        fills: the fields that get the value, such as `settings.grace_period`; the plan copies
            it there without a rule of its own.
    """

    name: str
    kind: ValueKind[Any]
    default: T
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    shown: str = ""
    fills: tuple[str, ...] = ()

    @property
    def long(self) -> str:
        """The name as typed: `--min-np`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it: `ELASTICRUN_MIN_NP`."""
        return "ELASTICRUN_" + self.name.upper().replace("-", "_")


class Heading:
    """A heading of `--help` and the options under it, in their order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.options: list[Option[Any]] = []

    def add(
        self,
        name: str,
        kind: ValueKind[T],
        default: T,
        help: str,  # noqa: A002
        *,
        aliases: tuple[str, ...] = (),
        shown: str = "",
        fills: tuple[str, ...] = (),
    ) -> Option[T]:
        """Add an option that a rule of the plan reads."""
        option = Option(name, kind, default, self.text, help, aliases, shown, fills)
        self.options.append(option)
        return option

    def fill(
        self,
        fields: str,
        name: str,
        kind: ValueKind[Any],
        help: str,  # noqa: A002
        *,
        aliases: tuple[str, ...] = (),
        shown: str = "",
    ) -> Option[Any]:
        """Add an option whose value goes into these fields; the first one has the default."""
        fills = tuple(fields.split())
        default = field_of(fills[0]).default
        return self.add(name, kind, default, help, aliases=aliases, shown=shown, fills=fills)


def field_of(path: str) -> msgspec.structs.FieldInfo:
    """Return the field that a path such as `settings.grace_period` names."""
    struct, _, name = path.partition(".")
    found = {field.name: field for field in msgspec.structs.fields(FILLED[struct])}
    return found[name]
