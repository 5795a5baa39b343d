"""What is to run on a host for an agent to be there, apart from running it.

A backend has two halves: `plan` says what will be executed (pure, shown by --dry-run and
compared in tests), and the `AgentStarter` methods do it. The driver sees only the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from elastic_driver.runtime.backend import AgentStarter
from launcher.agent.spare import WHEN_TOLD

_AGENT = "launcher.agent"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class AgentPlan:
    """One agent's process: where, what, and what is added to the environment."""

    host: str
    incarnation: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path = (
        PACKAGE_ROOT  # `python -m` looks here first: a user's own `launcher` cannot shadow us
    )


class Backend(AgentStarter, Protocol):
    """A way to get agents onto hosts."""

    def plan(self, host: str, incarnation: int) -> AgentPlan:
        """What `start` would execute; raises ClusterError for a host this backend cannot reach."""
        ...


def spare_argv(python: str) -> tuple[str, ...]:
    """The command line of an agent that is told its words later."""
    return (python, "-m", _AGENT, WHEN_TOLD)


def words_of(plan: AgentPlan) -> tuple[str, ...]:
    """What it is told then."""
    return plan.argv[len(spare_argv("")) - 1 :]


def agent_argv(
    *,
    python: str,
    endpoint: str,
    host: str,
    incarnation: int,
    token_file: Path,
    address: str | None = None,
    lifeline: bool = False,
    orphan_files: tuple[Path, ...] = (),
) -> tuple[str, ...]:
    """The agent's command line, as `launcher.agent.__main__` reads it."""
    argv = [python, "-m", _AGENT, *agent_arguments(endpoint, host, incarnation)]
    argv += ["--token-file", str(token_file)]
    if address is not None:
        argv += ["--address", address]
    if lifeline:
        argv.append("--lifeline")
    for path in orphan_files:
        argv += ["--orphan-file", str(path)]
    return tuple(argv)


def agent_arguments(endpoint: str, host: str, incarnation: int) -> tuple[str, ...]:
    """The part of an agent's command line that says whose it is."""
    return ("--endpoint", endpoint, "--host", host, "--incarnation", str(incarnation))
