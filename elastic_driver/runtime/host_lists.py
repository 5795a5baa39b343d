"""The text forms of a host list: `-H h1:2,h2:2`, a hostfile, a discovery script's output.

Pure functions: text in, `Hosts` out, or a `HostListError` that names line and text. The
launcher calls them for the command line, `discovery` for scripts and files. One grammar serves
all three, so what works in one place works in the others:

    node1                one host, `default_slots` slots
    node1:4              four slots (MPICH's hostfile, horovodrun)
    node1 slots=4        four slots (Open MPI's hostfile; `max_slots=` is accepted there too and
                         changes nothing, because nothing here ever oversubscribes)
    n[01-04,07]:2        n01 n02 n03 n04 n07, two slots each (Slurm's ranges, zeros kept)
    [2001:db8::7]:2      an IPv6 address stands in brackets
    # text               a comment; blank lines are skipped

A host named twice has the sum of its slots, as with mpirun: a batch system's node file lists
a host once for each slot. `host:0` is a host that is there and takes no workers. Names end up
in ssh's argument list, in keys and in file names, so they are letters, digits, `.`, `_` and `-`,
and start with a letter or a digit.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from elastic_driver.errors import UsageError

Hosts: TypeAlias = tuple[tuple[str, int], ...]
"""(host, slots) in the order of first mention, without repeats."""

MAX_HOSTS = 100_000
MAX_SLOTS = 65_536  # of one host
MAX_NAME_CHARS = 253  # RFC 1035, section 2.3.4
_SHOWN_CHARS = 80

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SCOPE = re.compile(r"[A-Za-z0-9._-]+\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")  # no sign, no Unicode digits, no surprise in int()
_OPTION = re.compile(r"(slots|max[_-]slots)\s*=\s*(\S+)\s*\Z")
_GRAMMAR = "expected host, host:slots, 'host slots=N', name[01-04] or [IPv6]:slots"


class HostListError(UsageError):
    """A host list has an entry that is none; the whole list is refused.

    `line` counts from 1 (in a comma list: the entry), `text` is what stood there.
    """

    def __init__(self, source: str, line: int, text: str, problem: str) -> None:
        shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
        super().__init__(f"{source} {line}: {shown!r}: {problem}")
        self.source, self.line, self.text, self.problem = source, line, text, problem


def parse_hosts(text: str, *, default_slots: int = 1, source: str = "-H") -> Hosts:
    """The hosts of a comma list (`h1:2,h2:2`, `n[01-03,07]:4`), at least one."""
    entries = list(enumerate(_split_commas(text), start=1))
    return _collect(entries, default_slots, f"{source} entry")


def parse_host_lines(text: str, *, default_slots: int = 1, source: str) -> Hosts:
    """The hosts of a hostfile or of a discovery script's output; none at all is a result too."""
    lines = enumerate((line.partition("#")[0] for line in text.splitlines()), start=1)
    return _collect(
        [(n, line) for n, line in lines if line.strip()], default_slots, f"{source}, line"
    )


def check_host(name: str) -> str | None:
    """What is wrong with a host's name or address, or None where it is fit for use."""
    if len(name) > MAX_NAME_CHARS:
        return f"a name of {len(name)} characters; at most {MAX_NAME_CHARS}"
    if ":" in name:
        return None if _is_ipv6(name) else "not an IPv6 address"
    if not _NAME.match(name):
        return f"{name!r} is not a host name; {_GRAMMAR}"
    return None


def _collect(entries: Iterable[tuple[int, str]], default_slots: int, source: str) -> Hosts:
    """Parse each (number, text), summing the slots of hosts named twice."""
    slots_of: dict[str, int] = {}
    for number, text in entries:
        try:
            if not text.strip():
                raise ValueError(f"nothing there; {_GRAMMAR}")
            names, slots = _parse_entry(text.strip(), default_slots)
            for name in names:
                slots_of[name] = slots_of.get(name, 0) + slots
                if slots_of[name] > MAX_SLOTS:
                    raise ValueError(f"more than {MAX_SLOTS} slots on one host")
                if len(slots_of) > MAX_HOSTS:
                    raise ValueError(f"more than {MAX_HOSTS} hosts")
        except ValueError as error:
            raise HostListError(source, number, text.strip(), str(error)) from None
    return tuple(slots_of.items())


def _parse_entry(entry: str, default_slots: int) -> tuple[Iterator[str], int]:
    """One entry's host names and the slots of each; raises ValueError with the problem."""
    head, options = _split_options(entry)
    slots = options.get("slots")
    address, colon_slots = _split_slots(head)
    if colon_slots is not None and slots is not None:
        raise ValueError("slots given twice, as host:slots and as slots=N")
    if colon_slots is not None:
        slots = colon_slots
    if address.startswith("["):
        name = address[1:-1]
        if not _is_ipv6(name):
            raise ValueError(f"{name!r} is not an IPv6 address; {_GRAMMAR}")
        names: Iterator[str] = iter((name,))
    else:
        if _range_size(address) > MAX_HOSTS:
            raise ValueError(f"a range of more than {MAX_HOSTS} hosts")
        names = _checked(_expand(address))
    return names, default_slots if slots is None else slots


def _split_options(entry: str) -> tuple[str, dict[str, int]]:
    """`h slots=4` as `h` and its options; anything else after a blank is an error."""
    head, *others = entry.split(maxsplit=1)
    rest = others[0] if others else ""
    options: dict[str, int] = {}
    # `slots = 4` is written with blanks around the sign by some: close them up, then split.
    for word in re.sub(r"\s*=\s*", "=", rest).split():
        match = _OPTION.match(word)
        if match is None:
            raise ValueError(f"{word!r} after the host is not slots=N; {_GRAMMAR}")
        options[match[1].replace("-", "_")] = _parse_slots(match[2])
    return head, options


def _split_slots(head: str) -> tuple[str, int | None]:
    """`host:4` as host and 4; the colons of a bracketed IPv6 address are its own."""
    if head.startswith("["):
        address, bracket, rest = head.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"an IPv6 address is written [address] or [address]:slots; {_GRAMMAR}")
        return address + "]", _parse_slots(rest[1:]) if rest else None
    address, colon, slots = head.partition(":")
    if ":" in slots:
        raise ValueError("more than one colon; an IPv6 address is written [address]:slots")
    return address, _parse_slots(slots) if colon else None


def _parse_slots(text: str) -> int:
    if not _NUMBER.match(text):
        raise ValueError(f"{text!r} is not a number of slots (0 to {MAX_SLOTS})")
    slots = int(text)
    if slots > MAX_SLOTS:
        raise ValueError(f"{slots} slots; at most {MAX_SLOTS}")
    return slots


def _split_commas(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _checked(names: Iterator[str]) -> Iterator[str]:
    for name in names:
        problem = check_host(name)
        if problem:
            raise ValueError(problem)
        yield name


def _is_ipv6(name: str) -> bool:
    address, percent, scope = name.partition("%")
    if percent and not _SCOPE.match(scope):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


# ---- ranges: n[01-04,07] -----------------------------------------------------------------


def _expand(name: str) -> Iterator[str]:
    """Every name a pattern stands for, the last bracket varying fastest (as Slurm does)."""
    prefix, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, suffix = rest.partition("]")
    for low, high, width in _spans(inside):
        for number in range(low, high + 1):
            yield from (f"{prefix}{number:0{width}d}{tail}" for tail in _expand(suffix))


def _range_size(name: str) -> int:
    """How many names a pattern stands for; checks its brackets before anything is expanded."""
    prefix, bracket, rest = name.partition("[")
    if "]" in prefix:
        raise ValueError(f"']' without '['; {_GRAMMAR}")
    if not bracket:
        return 1
    inside, closed, suffix = rest.partition("]")
    if not closed:
        raise ValueError(f"'[' without ']'; {_GRAMMAR}")
    return sum(high - low + 1 for low, high, _ in _spans(inside)) * _range_size(suffix)


def _spans(inside: str) -> list[tuple[int, int, int]]:
    """`01-04,07` as (first, last, digits) triples."""
    spans: list[tuple[int, int, int]] = []
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not (_NUMBER.match(low) and _NUMBER.match(high)):
            raise ValueError(f"{part!r} is not a range of numbers such as 01-04")
        if int(low) > int(high):
            raise ValueError(f"the range {part} runs backwards")
        spans.append((int(low), int(high), len(low)))
    return spans
