"""What the backends share, and how they are found by name.

Entry points name backends, sources of hosts, algorithms and monitors of the Brain; other packages
may have more of each. Ours are registered in setup.cfg. In a checkout this module reads that file,
because the metadata of an editable installation may be older.
"""

import configparser
import difflib
import logging
import os
import signal
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from elastic_driver.brain.algorithm import GROUP
from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import Backend, BackendJob
from launcher import DISTRIBUTION

log = logging.getLogger(__name__)


# ---- an agent's command line and its end --------------------------------------------------


PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class AgentPlan:
    """One agent's process: its command line, and what is added to the environment."""

    host: str
    incarnation: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    # `python -m` looks here first: a user's own `launcher` cannot shadow us.
    cwd: Path = PACKAGE_ROOT


def agent_arguments(endpoint: str, host: str, incarnation: int) -> tuple[str, ...]:
    """Return the arguments that every agent is given, wherever it runs."""
    return ("--endpoint", endpoint, "--host", host, "--incarnation", str(incarnation))


def unfollowed(host: str, error: Exception) -> str:
    """Log a bug of ours that keeps us from following an agent; return a sentence about it."""
    log.error("the agent on %s cannot be followed", host, exc_info=error)
    return f"the driver cannot follow the agent on {host} (a bug): {error!r}"


def describe_end(host: str, code: int) -> str:
    """Return a sentence on an agent's end; `code` is its exit status as subprocess gives it."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"the agent on {host} was killed by {name}"
    if code == 0:
        return f"the agent on {host} has ended"
    return f"the agent on {host} ended with exit status {code}; its last lines are above"


# ---- entry points -------------------------------------------------------------------------


BACKENDS = "elastic_driver.backends"
DISCOVERY = "elastic_driver.discovery"
MONITORS = "elastic_driver.monitors"
_OPTIONS = {
    BACKENDS: "--backend",
    DISCOVERY: "--host-discovery",
    GROUP: "--algorithm",
    MONITORS: "--source",
}
_PLANNED = {"ray": "it does not exist yet; use ssh, or local for this machine alone"}


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name; ours are not replaced by other packages."""
    installed = {point.name: point for point in metadata.entry_points(group=group)}
    return dict(sorted({**installed, **_ours(group)}.items()))


def load(group: str, name: str) -> Any:
    """Return the object of an entry point; raises UsageError if there is no such name."""
    known = _ours(group)
    if name not in known:  # only now: the metadata of all packages takes a while to read
        known = entry_points(group)
    option = _OPTIONS[group]
    if (point := known.get(name)) is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"there are {', '.join(known)}; others come with packages (docs/starters.md)"
        if close:
            hint = f"did you mean {close[0]}?"
        raise UsageError(f"{option} {name}: {_PLANNED.get(name, hint)}")
    try:
        return point.load()
    except Exception as error:  # another package's code may raise anything
        raise UsageError(
            f"{option} {name}: {point.value} cannot be imported ({type(error).__name__}: {error}); "
            "reinstall the package it belongs to"
        ) from error


def make_backend(name: str, job: BackendJob) -> Backend:
    """Return a new backend; raises UsageError if there is none of that name."""
    backend: Backend = load(BACKENDS, name)(job)
    return backend


def _ours(group: str) -> dict[str, metadata.EntryPoint]:
    parser = configparser.ConfigParser()
    parser.read(os.path.join(PACKAGE_ROOT, "setup.cfg"))
    if parser.get("metadata", "name", fallback="") == DISTRIBUTION:
        lines = parser.get("options.entry_points", group, fallback="").strip().splitlines()
        pairs = [map(str.strip, line.split("=")) for line in lines]
        return {name: metadata.EntryPoint(name, value, group) for name, value in pairs}
    try:
        found = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError:
        return {}
    return {point.name: point for point in found if point.group == group}
