"""Discovery of hosts from a script, a hostfile or the command line.

A `HostDiscovery` has one question to answer, `find()`. `DiscoveryThread` asks it every interval and
posts an event when the hosts have changed. When a source fails (hangs, exits non-zero, prints
garbage), the last known hosts stay and the reason is posted once. A script or file that named hosts
and names none is asked again before that counts: `kubectl … | awk …` prints nothing and ends with 0
when its server does not answer. Times are seconds.

Pure functions turn text into `Hosts`, or raise a `HostListError` with the line and its text. The
grammar of `-H h1:2,h2:2`, a hostfile and a discovery script's output is the same:

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
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.job.events import DiscoveryFailed, HostsDiscovered
from elastic_driver.runtime.probe import ProbeError, ScriptProbe

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


MAX_TEXT_BYTES = 1 << 20  # of a script's output or a hostfile
FAILURES_AT_ONCE = 10  # are told; then one each `FAILURE_EVERY_S`, as each may have a new reason
FAILURE_EVERY_S = 60.0
_SETTLED_AFTER = 0.02  # a file being rewritten looks the same twice only when it is finished


class DiscoveryError(ClusterError):
    """A source gave no usable answer this time; the last known hosts stay."""


class HostDiscovery(Protocol):
    """A source of hosts."""

    def find(self) -> Hosts:
        """Return the present hosts as (host, slots), in a stable order and without repeats.

        Returns within a bounded time. Raises ElasticError if there is no usable answer; no hosts
        at all is a usable answer.
        """

    def cancel(self) -> None:
        """Make a `find()` under way in another thread, and every later one, raise soon."""


class _SecondLook:
    """Takes an answer without hosts for one only if the one before it had none either."""

    def __init__(self) -> None:
        self._named = False  # hosts, in the last answer

    def taken(self, hosts: Hosts, source: str) -> Hosts:
        """Return these hosts; raises DiscoveryError for none after an answer with hosts."""
        named, self._named = self._named, bool(hosts)
        if named and not hosts:
            raise DiscoveryError(f"{source} names no host; it is asked again before that counts")
        return hosts


class FixedDiscovery:
    """The hosts of `-H`, or this machine: they never change."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def find(self) -> Hosts:
        """Return the same hosts every time."""
        return self.hosts

    def cancel(self) -> None:
        """Do nothing: `find()` does not wait."""


class HostfileDiscovery:
    """A hostfile, read again each time: editing it grows or shrinks the job."""

    def __init__(
        self, path: Path | str, *, default_slots: int = 1, timeout: float | None = None
    ) -> None:
        """Raises UsageError if the file cannot be read or parsed now; no `timeout` is needed."""
        self._path, self._default_slots, self._timeout = Path(path), default_slots, timeout
        self._cancelled = threading.Event()
        self._text, self._second_look = "", _SecondLook()
        try:
            self._text = self._read()
            self.find()
        except DiscoveryError as error:
            raise UsageError(str(error)) from error

    def find(self) -> Hosts:
        """Return the hosts in the file; if it has just changed, wait until it stays the same."""
        text = self._read()
        while text != self._text:
            self._text = text
            if self._cancelled.wait(_SETTLED_AFTER):
                raise DiscoveryError(f"hostfile {self._path}: reading was cancelled")
            text = self._read()
        source = f"hostfile {self._path}"
        hosts = parse_host_lines(text, default_slots=self._default_slots, source=source)
        return self._second_look.taken(hosts, source)

    def cancel(self) -> None:
        """End a `find()` that waits for the file to settle."""
        self._cancelled.set()

    def _read(self) -> str:
        name = f"hostfile {self._path}"
        try:
            status = self._path.stat()
            # A pipe without a writer would block; reading a folder raises.
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise DiscoveryError(f"{name} is not a regular file")
            if status.st_size > MAX_TEXT_BYTES:
                raise DiscoveryError(f"{name} is larger than {MAX_TEXT_BYTES} bytes")
            return self._path.read_bytes().decode("utf-8", "backslashreplace")
        except OSError as error:
            raise DiscoveryError(f"{name}: {error.strerror or error}") from error


class ScriptDiscovery:
    """A user's program that prints one host per line (the same contract as in horovodrun)."""

    def __init__(self, path: Path | str, *, timeout: float, default_slots: int = 1) -> None:
        """Raises UsageError if the file is no program that can be run."""
        self._path = Path(path).absolute()  # a later change of the working folder changes nothing
        self._default_slots, self._second_look = default_slots, _SecondLook()
        problem = None
        if not self._path.exists():
            problem = "does not exist"
        elif self._path.is_dir():
            problem = "is a folder, not a file"
        elif not os.access(self._path, os.R_OK | os.X_OK):
            first_line = "check that its first line names its interpreter (#!/bin/sh)"
            problem = f"is not executable; try chmod +x, and {first_line}"
        if problem is not None:
            raise UsageError(f"the discovery script {path} {problem}")
        self._probe = ScriptProbe(self._path, timeout=timeout, max_output=MAX_TEXT_BYTES)

    def find(self) -> Hosts:
        """Run the script once and return the hosts that it printed."""
        source = f"discovery script {self._path}"
        try:
            text = self._probe.run().decode("utf-8", "backslashreplace")
        except ProbeError as error:
            raise DiscoveryError(f"{source} {error}") from error
        hosts = parse_host_lines(text, default_slots=self._default_slots, source=source)
        return self._second_look.taken(hosts, source)

    def cancel(self) -> None:
        """Kill a running script, and never start one again."""
        self._probe.cancel()


class DiscoveryThread:
    """The thread that asks a source every interval and posts changes."""

    def __init__(
        self,
        source: HostDiscovery,
        *,
        interval: float,
        post: Callable[[HostsDiscovered | DiscoveryFailed], None],
    ) -> None:
        """Start nothing. `post` is called in this object's thread and must not block."""
        self._source, self._interval, self._post = source, interval, post
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._posted: Hosts | None = None
        self._last_reason: str | None = None
        self._may_tell, self._since = float(FAILURES_AT_ONCE), time.monotonic()

    def start(self) -> None:
        """Start the thread; the first answer is always posted, even an empty one."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel a running `find()` and wait up to `timeout` for the thread. Idempotent."""
        self._stopping.set()
        self._source.cancel()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            event = self._ask()
            if event is not None and not self._stopping.is_set():
                self._post(event)
            # From start to start: a script that takes half the interval does not stretch it.
            self._stopping.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def _ask(self) -> HostsDiscovered | DiscoveryFailed | None:
        """Ask once; return None if the answer is the same as before."""
        try:
            hosts = self._source.find()
        except Exception as error:  # a HostDiscovery of the user's own may raise anything
            reason = str(error)
            if not isinstance(error, ElasticError):
                reason = f"{type(self._source).__name__}: {type(error).__name__}: {reason}"
            if reason == self._last_reason or not self._is_to_tell():
                return None
            self._last_reason = reason
            return DiscoveryFailed(reason)
        self._last_reason = None
        before_hosts, self._posted = self._posted, hosts
        return None if hosts == before_hosts else HostsDiscovered(hosts)

    def _is_to_tell(self) -> bool:
        """Return whether one more failure is told: few at once, later ones now and then."""
        now = time.monotonic()
        earned = (now - self._since) / FAILURE_EVERY_S
        self._may_tell = min(float(FAILURES_AT_ONCE), self._may_tell + earned)
        self._since = now
        if self._may_tell < 1.0:
            return False
        self._may_tell -= 1.0
        return True
