"""Readers for the values of options: words in, a typed value out.

A `ValueKind` serves the command line, the environment and the configuration file alike, so a value
means the same wherever it stands. Readers are pure and raise `ValueError` with a phrase that
completes "--option …"; `launcher.options.values` adds which option and where it stood.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from elastic_driver.settings import TfRoles

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Words = tuple[str, ...]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_WHOLE = re.compile(r"[0-9]{1,9}\Z")  # int() would also take signs, blanks and Unicode digits
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_STREAMS = re.compile(r"[0-3]\Z|[0-9]+:[0-3](,[0-9]+:[0-3])*\Z")
# TensorFlow's roles, and how many of each there may be.
_TF_MOST = {"chief": 1, "worker": 10**9, "ps": 10**9, "evaluator": 1}


@dataclass(frozen=True)
class ValueKind(Generic[T_co]):
    """A form of value, and its reader.

    Attributes:
        read: turns the words of the option into its value.
        metavar: how `--help` shows the value; empty for a flag.
        words: words that follow the option on the command line (0: a flag).
        repeat: every occurrence adds its words; otherwise the last one wins.
    """

    read: Callable[[Words], T_co]
    metavar: str
    words: int = 1
    repeat: bool = False


def _one(read: Callable[[str], T], metavar: str) -> ValueKind[T]:
    def first(words: Words) -> T:
        if len(words) != 1:
            raise ValueError(f"takes one value, got {' '.join(words)!r}")
        return read(words[0])

    return ValueKind(first, metavar)


# ---- kinds -------------------------------------------------------------------------------


def flag() -> ValueKind[bool]:
    """A switch; in the environment and in files: 1/true/yes/on or 0/false/no/off."""

    def read(words: Words) -> bool:
        text = words[-1].lower() if words else "true"
        if text not in _TRUE | _FALSE:
            raise ValueError(f"is a switch: true or false, got {words[-1]!r}")
        return text in _TRUE

    return ValueKind(read, "", words=0)


def text(metavar: str) -> ValueKind[str]:
    """Any text that is not empty."""

    def read(word: str) -> str:
        if not word or "\0" in word:
            raise ValueError("needs a value that is not empty")
        return word

    return _one(read, metavar)


def whole(metavar: str = "N", least: int = 0) -> ValueKind[int]:
    """A whole number of at least `least`."""
    return _one(lambda word: _whole(word, least), metavar)


def whole_or(word_for_none: str) -> ValueKind[int | None]:
    """A whole number from 0, or a word that leaves the choice to us (None)."""

    def read(word: str) -> int | None:
        return None if word == word_for_none else _whole(word, 0, f" or {word_for_none}")

    return _one(read, f"N|{word_for_none}")


def seconds(*, positive: bool = True) -> ValueKind[float]:
    """A duration in seconds."""
    return _one(lambda word: _seconds(word, positive=positive), "SECONDS")


def seconds_range() -> ValueKind[tuple[float, float]]:
    """Two durations, the second one not shorter than the first."""

    def read(words: Words) -> tuple[float, float]:
        if len(words) != 2:
            raise ValueError(f"takes two values, MIN MAX, got {' '.join(words)!r}")
        low, high = (_seconds(word, positive=True) for word in words)
        if low > high:
            raise ValueError(f"needs MIN <= MAX, got {low:g} {high:g}")
        return low, high

    return ValueKind(read, "MIN MAX", words=2)


def choice(*names: str) -> ValueKind[str]:
    """One of a few names."""

    def read(word: str) -> str:
        if word not in names:
            raise ValueError(f"is one of {', '.join(names)}, got {word!r}")
        return word

    return _one(read, "|".join(names))


def node_range() -> ValueKind[tuple[int, int]]:
    """`MIN:MAX`, or `N` for both (torchrun's --nnodes)."""

    def read(word: str) -> tuple[int, int]:
        low, colon, high = word.partition(":")
        if not (_WHOLE.match(low) and (_WHOLE.match(high) if colon else True)):
            raise ValueError(f"needs N or MIN:MAX, got {word!r}")
        least, most = int(low), int(high if colon else low)
        if not 1 <= least <= most:
            raise ValueError(f"needs 1 <= MIN <= MAX, got {word}")
        return least, most

    return _one(read, "MIN[:MAX]")


def node_workers() -> ValueKind[int | str]:
    """A number of workers, or what to count: auto, cpu, gpu (torchrun's --nproc-per-node)."""

    def read(word: str) -> int | str:
        return word if word in {"auto", "cpu", "gpu"} else _whole(word, 1, ", auto, cpu or gpu")

    return _one(read, "N|auto|cpu|gpu")


def endpoint() -> ValueKind[tuple[str, int]]:
    """`HOST:PORT` or `HOST` (port 0: any free one); IPv6 in brackets."""

    def read(word: str) -> tuple[str, int]:
        match = re.match(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?\Z", word)
        if match is None or int(match[2] or 0) > 65535:
            raise ValueError(f"needs HOST:PORT with a port of 0 to 65535, got {word!r}")
        return match[1].strip("[]"), int(match[2] or 0)

    return _one(read, "HOST:PORT")


def variables() -> ValueKind[tuple[tuple[str, str | None], ...]]:
    """`NAME=VALUE`, or `NAME` (None: its value here), as often as wanted; the last one counts."""

    def read(words: Words) -> tuple[tuple[str, str | None], ...]:
        found: dict[str, str | None] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not _VARIABLE.match(name) or "\0" in value:
                raise ValueError(f"needs NAME=VALUE or NAME, got {word!r}")
            found[name] = value if equals else None
        return tuple(found.items())

    return ValueKind(read, "NAME[=VALUE]", repeat=True)


def numbers(metavar: str) -> ValueKind[tuple[int, ...]]:
    """Whole numbers with commas between them."""

    def read(word: str) -> tuple[int, ...]:
        return tuple(sorted({_whole(part.strip(), 0) for part in word.split(",")}))

    return _one(read, metavar)


def names(metavar: str) -> ValueKind[tuple[str, ...]]:
    """Names with commas between them."""

    def read(word: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in word.split(","))
        if not all(re.match(r"[A-Za-z0-9_.@:-]+\Z", name) for name in found):
            raise ValueError(f"needs names with commas between them, got {word!r}")
        return found

    return _one(read, metavar)


def streams() -> ValueKind[str]:
    """Streams, stdout (1) and stderr (2): 0 to 3, or per local rank `0:1,1:3` (torchrun)."""

    def read(word: str) -> str:
        if not _STREAMS.match(word):
            raise ValueError(
                f"is 0 (none), 1 (stdout), 2 (stderr), 3 (both) or 0:1,1:3, got {word!r}"
            )
        return word

    return _one(read, "0-3")


def tf_roles() -> ValueKind[TfRoles]:
    """`chief=1,ps=2,worker=*,evaluator=1`: TensorFlow roles; `worker=*` is added if not there."""

    def read(word: str) -> TfRoles:
        roles: dict[str, int | None] = {}
        for part in word.split(","):
            role, _, count = part.strip().partition("=")
            if role not in _TF_MOST:
                raise ValueError(f"knows the roles {', '.join(_TF_MOST)}, got {role or part!r}")
            if role in roles:
                raise ValueError(f"names {role} twice")
            roles[role] = _tf_count(role, count)
        roles.setdefault("worker", None)
        return tuple(roles.items())

    return _one(read, "chief=1,ps=2,worker=*,evaluator=1")


def _tf_count(role: str, count: str) -> int | None:
    if role == "worker":
        if count != "*":
            raise ValueError(
                f"needs worker=*, got worker={count}: they are all the others, -np and --max-np "
                "say how many"
            )
        return None
    found = _whole(count, 0)
    if found > _TF_MOST[role]:
        raise ValueError(f"allows TensorFlow's one {role} at most, got {found}")
    return found


# ---- numbers -----------------------------------------------------------------------------


def _whole(word: str, least: int, alternatives: str = "") -> int:
    if not _WHOLE.match(word) or int(word) < least:
        raise ValueError(f"needs a whole number of at least {least}{alternatives}, got {word!r}")
    return int(word)


def _seconds(word: str, *, positive: bool) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        bound = "more than 0" if positive else "0 or more"
        raise ValueError(f"needs a number of seconds, {bound}, got {word!r}")
    return value
