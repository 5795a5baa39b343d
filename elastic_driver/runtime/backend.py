"""Backends start agents on hosts.

The driver decides *that* an agent is to run (`job.decisions.StartAgent`); a backend (this machine,
ssh, Slurm, …) decides *how*. A backend is registered under a name as a Python entry point in the
group `elastic_driver.backends`; the entry point is a callable that takes a `BackendJob` and
returns a `Backend`. Orders do not travel this way: a running agent reads them from the store.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from elastic_driver.options import Heading, option, text, whole
from elastic_driver.runtime.discovery import Hosts

# Called once, with a reason for people, when an agent is gone or never came up.
OnLost: TypeAlias = Callable[[str], None]
# Called with a host, the incarnation of its agent, and a reason for people.
OnClosed: TypeAlias = Callable[[str, int, str], None]


class UnreachableReason(str):
    """A reason for `OnLost`: the host could not be reached. It is probed, not put in cool-down."""

    __slots__ = ()


class RefusedReason(str):
    """A reason for `OnLost`: the host refuses us or lacks something; trying again does not help."""

    __slots__ = ()


# fmt: off
@dataclass(frozen=True, kw_only=True)
class BackendJob:
    """The job and its rendezvous, as a backend needs to know them."""

    endpoint: str = "http://ADDRESS:PORT"  # the rendezvous' URL as this machine reaches it
    token_file: Path = Path("TOKEN_FILE")  # on this machine, mode 0600
    bind_host: str | None = None  # numeric address it listens on; None: not decided yet
    cwd: str = "/"  # the workers' folder
    hosts: Hosts = ()  # those known when the job starts
    grows: bool = False  # more hosts are likely to come
    environ: Mapping[str, str] = field(default_factory=dict)  # of elasticrun; may hold secrets
    heartbeat_timeout: float = 30.0  # seconds; a silent connection may be given up after this
    resumable: bool = False  # another driver may go on with the job, with the same token
    ssh_port: int | None = option(Heading.START, whole("PORT", least=1), None,
        "The port of sshd on every host (ssh and mpi).", aliases=("-p",),
        shown="as in ssh's configuration")
    ssh_identity_file: str | None = option(Heading.START, text("FILE"), None,
        "The private key for ssh (ssh and mpi).", aliases=("-i",),
        shown="as in ssh's configuration")
    mpi_args: str | None = option(Heading.START, text("WORDS"), None,
        "More words for the command line of mpirun: --mpi-args='--mca KEY VALUE'.")
    allocation: str | None = None  # Slurm's job id
    step_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of srun, by host
# fmt: on


class Backend(Protocol):
    """Starts agents and notices when one of them ends.

    The driver calls `start`, `kill` and `close`, all from its mailbox thread. The launcher calls
    the other methods before that; they have defaults. Creating a backend starts nothing.
    """

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """Begin to start the host's agent, its n-th incarnation (1, 2, …); return at once.

        Errors are reported through `on_lost` and never raised. An agent that is up posts
        `AgentReady` itself. Two incarnations of one host may exist at once for a moment; they are
        independent.

        Args:
            host: the name as discovery gave it (validated by `runtime.discovery`).
            incarnation: the number the agent is given; it grows with each start on that host.
            on_lost: call it exactly once, from any thread, when the agent's process has ended for
                whatever reason (exit status 0 included) or could not be started. It never blocks
                and never raises. The reason says what happened and what to try; it is an
                `UnreachableReason` if the host could not be reached, a `RefusedReason` if it is not
                going to work before somebody mends it. Do not call it after `close` has returned.
        """

    def kill(self, host: str, incarnation: int) -> None:
        """Kill one agent and everything it started; return at once.

        The driver calls it for an agent whose lease has expired. Nothing happens if the agent is
        gone or was never started. `on_lost` is called as usual once the process has ended; if the
        host cannot be reached, once that is certain.
        """

    def close(self, grace: float) -> None:
        """End every running agent and everything it started; no `start` follows.

        The agents were already ordered to shut down if possible. Wait up to `grace` seconds for
        them to exit, then kill the rest. Return within `grace` plus a few seconds and leave no
        process, thread or file behind. Idempotent; may be called if nothing was started.
        """

    def describe(self, host: str) -> str:
        """Return what `start` would run for this host, as one line for --dry-run.

        Raises ClusterError for a host that this backend cannot reach.
        """
        return f"an agent for {host}, started by {type(self).__name__}"

    def check(self, hosts: Hosts) -> None:  # noqa: ARG002
        """Raise UsageError if this backend cannot work on this machine or with these hosts.

        The launcher calls it before anything is started, and for --dry-run.
        """
        return

    def find_problems(self, hosts: Hosts) -> dict[str, str]:  # noqa: ARG002
        """Ask hosts if an agent can run there; return a problem for each that cannot run one.

        The problem is a `RefusedReason` where that makes sense (see `start`).
        """
        return {}

    def look_up(self, host: str) -> str:
        """Return the name or address by which the network knows a host."""
        return host

    def probe_address(self, host: str) -> tuple[str, int] | None:  # noqa: ARG002
        """Return the address and the port that answer if an agent could be started on a host.

        The driver connects there while the host is not reachable. None: only a start can tell
        (there is a proxy on the way). Called once for a host, from a thread; may take a while.
        """
        return None


@runtime_checkable
class ReportsConnections(Protocol):
    """A backend that can also say that its connection to a host has closed. This is optional."""

    def report_connections(self, on_closed: OnClosed) -> None:
        """Take the function to call whenever the connection to an agent that is up has closed.

        Call it only if the agent may still live; `on_lost` is for agents that have ended. It may be
        called from any thread, never blocks and never raises. The driver calls this once, before
        `start`.
        """


@runtime_checkable
class AdoptsAgents(Protocol):
    """A backend that can take over agents that an earlier driver has started. This is optional.

    Of a backend that cannot, the driver still has the lease and the heartbeats of such an agent.
    """

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:
        """Treat an agent that has reported to this driver as if `start` had started it.

        From then on `on_lost`, `kill` and `close` are as described in `Backend`. The driver calls
        this from its mailbox thread, once for an agent. It returns at once and never raises.

        Args:
            host: the host's name, as `start` was given it.
            incarnation: the number of the agent.
            pid: the agent's process on its host.
            on_lost: see `Backend.start`. Call it only if the agent has ended for certain: an agent
                that this machine cannot reach may well train on.
        """


# `(endpoint, token_file) -> backend`: the driver calls it once its rendezvous is up.
MakeBackend: TypeAlias = Callable[[str, Path], Backend]
