"""Shared by the backends: the agent's command line, and the description of an agent's end."""

import logging
import signal
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)
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
