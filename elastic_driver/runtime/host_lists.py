"""Parsing of host lists: `-H h1:2,h2:2`, a hostfile, a discovery script's output.

Pure functions: they turn text into `Hosts`, or raise a `HostListError` with the line and its text.
The grammar is the same for all three:

    node1                one host, `default_slots` slots
    node1:4              four slots (MPICH's hostfile, horovodrun)
    node1 slots=4        four slots (Open MPI's hostfile; `max_slots=` is accepted there too and
                         changes nothing, because hosts are never oversubscribed)
    n[01-04,07]:2        n01 n02 n03 n04 n07, two slots each (Slurm's ranges, zeros kept)
    [2001:db8::7]:2      an IPv6 address stands in brackets
    # text               a comment; blank lines are skipped

A host named twice has the sum of its slots, as with mpirun: a batch system's node file lists
a host once for each slot. `host:0` is a known host without workers. Names become ssh arguments,
keys and file names, so they consist of letters, digits, `.`, `_` and `-`, and start with a letter
or a digit.
"""

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from elastic_driver.errors import UsageError

# (host, slots) in the order of first mention, without repeats.
Hosts: TypeAlias = tuple[tuple[str, int], ...]

MAX_HOSTS = 100_000
MAX_SLOTS = 65_536  # of one host
LOOKS_LIKE_PORT = 1024  # after host:
MAX_NAME_CHARS = 253  # RFC 1035, section 2.3.4
_SHOWN_CHARS = 80

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\Z")  # an address and its scope
_NUMBER = re.compile(r"[0-9]{1,9}\Z")  # no sign, no Unicode digits, no surprise in int()
_HEAD = re.compile(r"(\[[^]]*\](?=:|\Z)|[^:]*)(?::([^:]*))?\Z")  # `host` or `host:slots`
_OPTION = re.compile(r"(slots|max[_-]slots)=(\S+)\Z")
_GRAMMAR = "expected host, host:slots, 'host slots=N', name[01-04] or [IPv6]:slots"


class HostListError(UsageError):
    """A host list has an invalid entry; the whole list is refused.

    `line` counts lines (in a comma list: entries) from 1, `text` is the invalid entry.
    """

    def __init__(self, source: str, line: int, text: str, problem: str) -> None:
        shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
        super().__init__(f"{source} {line}: {shown!r}: {problem}")
        self.source, self.line, self.text, self.problem = source, line, text, problem


def parse_hosts(text: str, *, default_slots: int = 1, source: str = "-H") -> Hosts:
    """Return the hosts of a comma list (`h1:2,h2:2`, `n[01-03,07]:4`), at least one."""
    entries = enumerate(re.split(r",(?![^\[]*\])", text), start=1)  # commas outside of brackets
    return _collect(entries, default_slots, f"{source} entry")


def parse_host_lines(text: str, *, default_slots: int = 1, source: str) -> Hosts:
    """Return the hosts of a hostfile or a discovery script's output; there may be none."""
    without_mark = text.removeprefix("\ufeff")  # editors on Windows begin a file with it
    lines = enumerate((line.partition("#")[0] for line in without_mark.splitlines()), start=1)
    entries = ((n, line) for n, line in lines if line.strip())
    return _collect(entries, default_slots, f"{source}, line")


def check_host(name: str) -> str | None:
    """Return what is wrong with a host's name or address, or None."""
    if len(name) > MAX_NAME_CHARS:
        return f"a name of {len(name)} characters; at most {MAX_NAME_CHARS}"
    if "@" in name:
        user, _, host = name.rpartition("@")
        hint = f"leave it out, and say 'Host {host}' and 'User {user}' in ~/.ssh/config"
        return f"{name!r} names a user; {hint}"
    if ":" not in name:
        return None if _NAME.match(name) else f"{name!r} is not a host name; {_GRAMMAR}"
    with contextlib.suppress(ValueError):
        if _IPV6.match(name) and ipaddress.IPv6Address(name):
            return None
    return f"{name!r} is not an IPv6 address; {_GRAMMAR}"


def _collect(entries: Iterable[tuple[int, str]], default_slots: int, source: str) -> Hosts:
    """Parse each (number, text), summing the slots of hosts named twice."""
    slots_of: dict[str, int] = {}
    for number, text in entries:
        try:
            if not text.strip():
                raise ValueError(f"the entry is empty; {_GRAMMAR}")
            names, slots = _parse_entry(text.strip(), default_slots)
            for name in names:
                if problem := check_host(name):
                    raise ValueError(problem)
                slots_of[name] = slots_of.get(name, 0) + slots
                if slots_of[name] > MAX_SLOTS:
                    raise ValueError(f"more than {MAX_SLOTS} slots on one host")
                if len(slots_of) > MAX_HOSTS:
                    raise ValueError(f"more than {MAX_HOSTS} hosts")
        except ValueError as error:
            raise HostListError(source, number, text.strip(), str(error)) from None
    return tuple(slots_of.items())


def _parse_entry(entry: str, default_slots: int) -> tuple[Iterator[str], int]:
    """Return an entry's host names and the slots of each; raises ValueError with the problem."""
    head, *others = entry.split(maxsplit=1)
    match = _HEAD.match(head)
    if match is None:
        raise ValueError(f"{head!r} is not a host; {_GRAMMAR}")
    address = match[1]
    slots = None if match[2] is None else _parse_slots(match[2])
    if slots is not None and slots >= LOOKS_LIKE_PORT:
        raise ValueError(
            f"{slots} would be the slots of {address}; if it is the port of its sshd, say -p "
            f"{slots}, or Port in ~/.ssh/config; if they are slots, say '{address} slots={slots}'"
        )
    # Some files have blanks around the sign (`slots = 4`): remove them before splitting.
    for word in re.sub(r"\s*=\s*", "=", others[0] if others else "").split():
        option = _OPTION.match(word)
        if option is None:
            raise ValueError(f"{word!r} after the host is not slots=N; {_GRAMMAR}")
        number = _parse_slots(option[2])
        if option[1] == "slots" and slots is not None:
            raise ValueError("slots given twice, as host:slots and as slots=N")
        slots = number if option[1] == "slots" else slots
    if address.startswith("["):
        if ":" not in address:
            raise ValueError(f"{address[1:-1]!r} is not an IPv6 address; {_GRAMMAR}")
        names = iter((address[1:-1],))
    else:
        names = _expand(address)
    return names, default_slots if slots is None else slots


def _parse_slots(text: str) -> int:
    if not _NUMBER.match(text) or int(text) > MAX_SLOTS:
        raise ValueError(f"{text!r} is not a number of slots (0 to {MAX_SLOTS}); {_GRAMMAR}")
    return int(text)


def _expand(name: str) -> Iterator[str]:
    """Yield the names of a pattern `n[01-04,07]`; the last bracket varies fastest, as in Slurm."""
    prefix, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, closed, suffix = rest.partition("]")
    if not closed:
        raise ValueError(f"'[' without ']'; {_GRAMMAR}")
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not (_NUMBER.match(low) and _NUMBER.match(high)):
            raise ValueError(f"{part!r} is not a range of numbers such as 01-04")
        if int(low) > int(high):
            raise ValueError(f"the range {part} runs backwards")
        for number in range(int(low), int(high) + 1):
            yield from (f"{prefix}{number:0{len(low)}d}{tail}" for tail in _expand(suffix))
