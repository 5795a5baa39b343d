"""What an option is, and the headings it may stand under in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from launcher.options.kinds import Kind

T = TypeVar("T")

HOSTS = "Hosts (one of them; default: this machine)"
JOIN = "Nodes that join by themselves (docs/joining.md)"
SIZE = "Size of the job"
POLICY = "What to do when workers and hosts fail (times in seconds)"
START = "Starting workers"
TENSORFLOW = "TensorFlow (docs/tensorflow.md)"
CHECK = "Checking the nodes before training (docs/node-checks.md)"
OUTPUT = "Output"
STATE = "Identity and state"
OTHER = "Other"
GROUPS = (HOSTS, JOIN, SIZE, POLICY, START, TENSORFLOW, CHECK, OUTPUT, STATE, OTHER)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: each record is unique
class Option(Generic[T]):
    """One option: its long name, how its value is read, and what it means.

    Attributes:
        name: the long name without dashes, hyphenated; also the key in a configuration file.
        kind: how the value is read.
        default: the value when nobody says anything.
        group: the heading in `--help`.
        help: one or two lines for users.
        aliases: other spellings with their dashes, e.g. `-np`.
        shown: the default in words, where the value itself does not say it.
    """

    name: str
    kind: Kind[Any]
    default: T
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    shown: str = ""

    @property
    def long(self) -> str:
        """The name as typed: `--min-np`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it: `ELASTICRUN_MIN_NP`."""
        return "ELASTICRUN_" + self.name.upper().replace("-", "_")
