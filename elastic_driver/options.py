"""Options of `elasticrun`: a dataclass field with a record, and readers for values. Pure.

The struct that a part of the system receives declares its options: `option(…)` takes the place of
the field's default. The launcher collects the records (`launcher.options`), reads the command line,
the environment and the configuration file with them, prints `--help`, and fills the structs. mypy
checks that reader, default and field have the same type. Readers raise `ValueError` with a phrase
that completes "--option …".

A command line, a plan and a status go to terminals, tickets and metrics. So the values of options
and variables with names like secrets are shown as `***` (`masked`).
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")
D = TypeVar("D")
T_co = TypeVar("T_co", covariant=True)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_WHOLE = re.compile(r"[0-9]{1,9}\Z")  # int() would also take signs, blanks and Unicode digits
_NAME = r"\s*[A-Za-z0-9_.@:-]+\s*"
# Words of --bind, torchrun's --numa-binding and mpirun's --bind-to → what they mean here.
_BINDINGS = {
    "none": "none",
    "numa": "numa",
    "core": "core",
    "node": "numa",
    "socket": "numa",
    "exclusive": "core",
    "core-complex": "core",
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
ACCELERATORS = frozenset({"gpu", "xpu", "npu"})  # of --nproc-per-node
# TensorFlow's roles, in the order in which workers get them; (role, None): all other workers.
TfRoles = tuple[tuple[str, int | None], ...]
# TensorFlow's roles, and the largest number of each.
_TF_MOST = {"chief": 1, "worker": 10**9, "ps": 10**9, "evaluator": 1}


class Heading(Enum):
    """The headings of `--help`, in their order."""

    HOSTS = "Hosts (one of them; default: this machine)"
    BRAIN = "A Brain that shares hosts among jobs (docs/brain.md)"
    JOIN = "Nodes that join by themselves (docs/joining.md)"
    SIZE = "Size of the job"
    POLICY = "What to do when workers and hosts fail (times in seconds)"
    START = "Starting workers"
    TENSORFLOW = "TensorFlow (docs/tensorflow.md)"
    CHECK = "Checking the hosts before training (docs/node-checks.md)"
    OUTPUT = "Output of the workers"
    HOROVOD = "Horovod scripts (docs/from-horovod.md)"
    STATE = "Name and state of the job, and the driver's death (docs/driver-loss.md)"
    TRUST = "Who is trusted (docs/security.md)"
    OTHER = "Other"


@dataclass(frozen=True)
class ValueKind(Generic[T_co]):
    """A form of value, and its reader.

    Attributes:
        read: returns the value; takes the words of the option as its arguments.
        metavar: the value's form in `--help`; empty for a flag.
        words: the number of words that follow the option on the command line (0: a flag).
        repeat: every occurrence adds its words; otherwise, but for a list, the last one wins.
        listed: a list with commas; every occurrence adds to it.
        private: the words are variables, whose values may be secrets: only their names are shown.
    """

    read: Callable[..., T_co]
    metavar: str = ""
    words: int = 1
    repeat: bool = False
    listed: bool = False
    private: bool = False

    def added(self, before: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words of the option with one more occurrence on the command line."""
        if self.listed and before:
            return (",".join(before + words),)
        return before + words if self.repeat else words


def option(
    heading: Heading,
    kind: ValueKind[T],
    default: D,
    help: str,  # noqa: A002
    *,
    aliases: tuple[str, ...] = (),
    shown: str = "",
    flag: str = "",
) -> T | D:
    """Return a dataclass field that an option of `elasticrun` sets.

    Args:
        heading: the heading in `--help`.
        kind: the reader of the value.
        default: the value if the option is not given.
        help: one or two lines for users.
        aliases: other spellings with their dashes, such as `-np`.
        shown: the default in words, if the value itself does not explain it.
        flag: the flag without dashes, if it is not the field's name with hyphens.
    """
    record = {"heading": heading, "kind": kind, "help": help, "aliases": aliases, "shown": shown}
    return field(default=default, metadata={**record, "flag": flag})


# ---- kinds of values ---------------------------------------------------------------------


def _flag(word: str = "true") -> bool:
    if word.lower() not in _TRUE | _FALSE:
        raise ValueError(f"is a switch: true or false, got {word!r}")
    return word.lower() in _TRUE


def matching(metavar: str, pattern: str, needs: str, convert: Callable[[str], T]) -> ValueKind[T]:
    """Return the kind of a word with a pattern; `needs` completes "--option …" if it differs."""

    def read(word: str) -> T:
        if not re.fullmatch(pattern, word):
            raise ValueError(f"{needs}, got {word!r}")
        return convert(word)

    return ValueKind(read, metavar)


def text(metavar: str) -> ValueKind[str]:
    """Return the kind of any text that is not empty."""
    return matching(metavar, r"[^\0]+", "needs a value that is not empty", str)


def whole(metavar: str = "N", *, least: int = 0) -> ValueKind[int]:
    """Return the kind of a whole number of at least `least`."""
    return ValueKind(lambda word: _whole(word, least), metavar)


def number(metavar: str = "N", *, most: float = math.inf) -> ValueKind[float]:
    """Return the kind of a finite number from 0 to `most`."""
    return ValueKind(lambda word: _number(word, most), metavar)


def whole_or(name: str, least: int = 0) -> ValueKind[int | None]:
    """Return the kind of a whole number from `least`, or a word that stands for None."""
    return ValueKind(
        lambda word: None if word == name else _whole(word, least, f" or {name}"), f"N|{name}"
    )


def seconds_or(name: str, meaning: float) -> ValueKind[float]:
    """Return the kind of a number of seconds, or a word that stands for `meaning` seconds."""
    return ValueKind(lambda word: meaning if word == name else _seconds(word), f"{name}|SECONDS")


def choice(*names: str) -> ValueKind[str]:
    """Return the kind of one of a few names."""
    return matching("|".join(names), "|".join(names), f"is one of {', '.join(names)}", str)


def names(metavar: str) -> ValueKind[tuple[str, ...]]:
    """Return the kind of a list of names with commas between them."""
    pattern, needs = f"{_NAME}(,{_NAME})*", "needs names with commas between them"
    kind = matching(metavar, pattern, needs, lambda word: tuple(map(str.strip, word.split(","))))
    return replace(kind, listed=True)


def _whole(word: str, least: int, alternatives: str = "") -> int:
    if not _WHOLE.match(word) or int(word) < least:
        raise ValueError(f"needs a whole number of at least {least}{alternatives}, got {word!r}")
    return int(word)


def _finite(word: str) -> float:
    """Return a number; NaN for a word that is none, and for infinity."""
    try:
        value = float(word)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _number(word: str, most: float) -> float:
    value = _finite(word)
    if not 0 <= value <= most:
        bound = "from 0 on" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"needs a number {bound}, got {word!r}")
    return value


def _seconds(word: str, *, zero: bool = False) -> float:
    value = _finite(word)
    if not value >= 0 or (value == 0 and not zero):
        bound = "0 or more" if zero else "more than 0"
        raise ValueError(f"needs a number of seconds, {bound}, got {word!r}")
    return value


def _seconds_range(shortest: str, longest: str) -> tuple[float, float]:
    low, high = _seconds(shortest), _seconds(longest)
    if low > high:
        raise ValueError(f"needs MIN <= MAX, got {low:g} {high:g}")
    return low, high


def _ports(word: str) -> tuple[int, int]:
    match = re.match(r"([0-9]{1,5})-([0-9]{1,5})\Z", word)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError(f"needs LO-HI with 1 <= LO <= HI <= 65535, got {word!r}")
    return int(match[1]), int(match[2])


def _node_range(word: str) -> tuple[int, int]:
    low, _, high = word.partition(":")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise ValueError(f"needs 1 <= MIN <= MAX, got {word}")
    return least, most


def _node_workers(word: str) -> int | str:
    names = {"auto", "cpu", *ACCELERATORS}
    return word if word in names else _whole(word, 1, ", auto, cpu, gpu, xpu or npu")


def _endpoint(word: str) -> tuple[str, int]:
    match = re.match(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?\Z", word)
    if match is None or int(match[2] or 0) > 65535:
        raise ValueError(f"needs HOST:PORT with a port of 0 to 65535, got {word!r}")
    return match[1].strip("[]"), int(match[2] or 0)


def _variables(*words: str) -> tuple[tuple[str, str | None], ...]:
    found: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _VARIABLE.match(name) or "\0" in value:
            raise ValueError(f"needs NAME=VALUE or NAME, got {word!r}")
        found[name] = value if equals else None
    return tuple(found.items())


def _numbers(word: str) -> tuple[int, ...]:
    return tuple(sorted({_whole(part.strip(), 0) for part in word.split(",")}))


def _tf_roles(word: str) -> TfRoles:
    roles: dict[str, int | None] = {}
    for part in word.split(","):
        role, _, count = part.strip().partition("=")
        if role not in _TF_MOST:
            raise ValueError(f"knows the roles {', '.join(_TF_MOST)}, got {role or part!r}")
        if role in roles:
            raise ValueError(f"names {role} twice")
        if role == "worker" and count != "*":
            others = "they are all other processes, and -np and --max-np set their number"
            raise ValueError(f"needs worker=*, got worker={count}: {others}")
        roles[role] = None if role == "worker" else _whole(count, 0)
        if (roles[role] or 0) > _TF_MOST[role]:
            raise ValueError(f"allows TensorFlow's one {role} at most, got {count}")
    roles.setdefault("worker", None)
    return tuple(roles.items())


FLAG = ValueKind(_flag, words=0)  # in the environment and in files: 1/true/yes/on, 0/false/no/off
SECONDS = ValueKind(_seconds, "SECONDS")
SECONDS_OR_0 = ValueKind(lambda word: _seconds(word, zero=True), "SECONDS")
SECONDS_OR_AUTO = ValueKind(  # auto: None
    lambda word: None if word == "auto" else _seconds(word, zero=True), "auto|SECONDS"
)
LOG_LEVEL = matching(  # of Horovod
    "TRACE|DEBUG|INFO|WARNING|ERROR|FATAL",
    "(?i:trace|debug|info|warning|error|fatal)",
    "is one of TRACE, DEBUG, INFO, WARNING, ERROR, FATAL",
    str.upper,
)
SECONDS_RANGE = ValueKind(_seconds_range, "MIN MAX", words=2)
PORTS = ValueKind(_ports, "LO-HI")
BIND = matching(
    "none|numa|core",
    "|".join(_BINDINGS),
    f"is one of {', '.join(_BINDINGS)}",
    _BINDINGS.__getitem__,
)
# torchrun's --nnodes
NODE_RANGE = matching("MIN[:MAX]", r"[0-9]{1,9}(:[0-9]{1,9})?", "needs N or MIN:MAX", _node_range)
NODE_WORKERS = ValueKind(_node_workers, "N|auto|cpu|gpu|xpu|npu")  # torchrun's --nproc-per-node
ENDPOINT = ValueKind(_endpoint, "HOST:PORT")  # IPv6 in brackets; without a port: port 0
# NAME alone: value None
VARIABLES = ValueKind(_variables, "NAME[=VALUE]", repeat=True, private=True)
NUMBERS = ValueKind(_numbers, "0,1")
STREAMS = matching(  # torchrun's --redirects: 0 to 3, or per local rank 0:1,1:3
    "0-3",
    r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*",
    "is 0 (none), 1 (stdout), 2 (stderr), 3 (both) or 0:1,1:3",
    str,
)
TF_ROLES = ValueKind(_tf_roles, "chief=1,ps=2,worker=*,evaluator=1")


MASK = "***"
_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH")
_SECRET_OPTION = re.compile(
    r"(?:^|[-_.])(?:token|secret|key|apikey|passwd|password|passphrase|credentials?)$",
    re.IGNORECASE,
)
_VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")
_USER_OF_URL = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+@")


def is_secret(variable: str) -> bool:
    """Return whether the name of a variable looks like a secret's."""
    return _SECRET_VARIABLE.search(variable.upper()) is not None


def masked(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command line without the values that look like secrets."""
    shown: list[str] = []
    hide = False  # the value of the option before
    for word in words:
        name, equals, value = word.partition("=")
        option = name.lstrip("-")
        secret = (
            is_secret(name)
            if _VARIABLE_NAME.match(name)
            else _SECRET_OPTION.search(option) is not None
        )
        if hide and not word.startswith("-"):
            shown.append(MASK)
            hide = False
            continue
        hide = secret and not equals and word.startswith("--")
        hidden = secret and equals and value
        shown.append(f"{name}={MASK}" if hidden else without_password(word))
    return tuple(shown)


def without_password(text: str) -> str:
    """Return a text without the passwords of URLs in it (`https://user:***@host`)."""
    return _USER_OF_URL.sub(rf"\1:{MASK}@", text)
