"""The hosts of a job: which option, or Slurm, or mpirun, names them. Pure.

`launch` calls it with the options' values and the facts of this machine.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from elastic_driver.errors import UsageError
from elastic_driver.runtime.host_lists import Hosts, parse_host_lines, parse_hosts
from launcher.backends.mpi_ranks import started_ranks
from launcher.backends.slurm_allocation import SlurmAllocation, read_allocation
from launcher.options import table as o
from launcher.options.record import Option
from launcher.options.values import OptionValues
from launcher.plan.role import Serve, host_options

THIS_MACHINE = "localhost"
HOSTFILE, SCRIPT = "hostfile", "script"  # discoveries that have an option of their own
_SHOWN = 8  # of a long list


class FixedHosts(Struct, frozen=True):
    """These hosts for the whole job, or as long as the Slurm job `allocation` has them."""

    hosts: Hosts
    source: str
    allocation: str | None = None


class DiscoveredHosts(Struct, frozen=True):
    """Hosts that are asked for again and again; `hosts` are those known now, None: none are."""

    discovery: str  # a registered name
    argument: str
    default_slots: int
    timeout: float  # seconds for one answer
    hosts: Hosts | None = None

    @property
    def source(self) -> str:
        """The script or file, or the discovery with its argument."""
        own = self.discovery in (HOSTFILE, SCRIPT)
        return self.argument if own else f"{self.discovery}:{self.argument}".rstrip(":")


class JoinedHosts(Struct, frozen=True):
    """Nodes that join by themselves, and the server's own one if it trains too."""

    host: str  # as the nodes know the server
    port: int
    own: Hosts
    default_slots: int  # of a node that does not say
    token_file: str | None = None
    run_id: str | None = None  # as given: who knows it may join, unless there is a token file
    hosts: None = None  # nobody knows them beforehand

    @property
    def note(self) -> str:
        """A remark for the user on who may join."""
        if self.token_file is not None:
            return ""
        if self.run_id is not None:
            return (
                f"whoever knows the run id {self.run_id} and reaches port {self.port} can join "
                "this job; give --token-file on every node for a real secret"
            )
        return (
            "nodes can join only with this run's token, from a shared --state-dir; give the same "
            "--run-id (--rdzv-id) or --token-file on every node otherwise"
        )


HostSource: TypeAlias = FixedHosts | DiscoveredHosts | JoinedHosts


def describe_hosts(source: HostSource) -> str:
    """Return the hosts in words."""
    if isinstance(source, JoinedHosts):
        own = "".join(f"{host}:{slots} (this node), and " for host, slots in source.own)
        return f"{own}nodes that join {source.host}:{source.port}"
    if source.hosts is None:
        return f"found by {source.source}"
    shown = ", ".join(f"{host}:{slots}" for host, slots in source.hosts[:_SHOWN])
    more = len(source.hosts) - _SHOWN
    return f"{shown}{f' and {more} more' if more > 0 else ''} ({source.source})"


def joined_hosts(values: OptionValues, name: str, role: Serve, slots: int | None) -> JoinedHosts:
    """Return the hosts of a job that this node, called `name`, serves."""
    return JoinedHosts(
        host=role.host,
        port=role.port,
        own=((name, slots or 1),) if role.own else (),
        default_slots=slots or 1,
        token_file=values[o.TOKEN_FILE],
        run_id=values[o.RUN_ID],
    )


def choose_hosts(
    values: OptionValues,
    *,
    slots: int | None,
    wanted: int | None,
    hostfile_text: str | None,
    ranks: Hosts | None,
    allocation: SlurmAllocation | None,
) -> FixedHosts | DiscoveredHosts:
    """Return the hosts that an option names, else mpirun's or the allocation's, else this machine.

    Args:
        values: the options.
        slots: of a host that is listed without a number; None: nobody said.
        wanted: workers of the whole job; None: nobody said.
        hostfile_text: the text of the hostfile, if one is named.
        ranks: the hosts of mpirun's ranks, if it has started us.
        allocation: the Slurm allocation that agents are started in.
    """
    chosen = choose_host_option(values)
    if chosen is None and ranks is not None:
        return FixedHosts(ranks, "the ranks of mpirun")
    if chosen is None and allocation is not None:
        return FixedHosts(allocation.hosts(slots, wanted), allocation.source, allocation.job_id)
    if chosen is o.HOSTS_LIST:
        text = str(values[o.HOSTS_LIST])
        return FixedHosts(parse_hosts(text, default_slots=slots or 1), "--hosts")
    named = choose_discovery(values)
    if named is None:
        return FixedHosts(((THIS_MACHINE, slots or wanted or 1),), "this machine")
    name, argument = named
    known = None
    if name == HOSTFILE:
        known = parse_host_lines(hostfile_text or "", default_slots=slots or 1, source=argument)
    return DiscoveredHosts(name, argument, slots or 1, values[o.DISCOVERY_TIMEOUT], known)


def choose_host_option(values: OptionValues) -> Option[Any] | None:
    """Return the option that says where to run, by the nearest source; None: nobody says.

    Raises UsageError if two of the same source contradict each other.
    """
    named = sorted(host_options(values), key=values.level, reverse=True)
    if len(named) > 1 and values.level(named[0]) == values.level(named[1]):
        raise UsageError(
            f"{named[0].long} and {named[1].long} both say where to run; keep one of them"
        )
    return named[0] if named else None


def choose_discovery(values: OptionValues) -> tuple[str, str] | None:
    """Return the name and the argument of the discovery that is asked for hosts; None: none is."""
    chosen = choose_host_option(values)
    if chosen is o.HOST_DISCOVERY_SCRIPT:
        return SCRIPT, str(values[o.HOST_DISCOVERY_SCRIPT])
    if chosen is o.HOSTFILE:
        return HOSTFILE, str(values[o.HOSTFILE])
    if chosen is o.HOST_DISCOVERY:
        name, _, argument = str(values[o.HOST_DISCOVERY]).partition(":")
        return name, argument
    return None


# ---- Slurm and mpirun --------------------------------------------------------------------


def choose_allocation(values: OptionValues, environ: Mapping[str, str]) -> SlurmAllocation | None:
    """Return the Slurm allocation that the agents are to be started in; None: none.

    It is ours with --backend slurm, and with --backend auto if nothing else says where to run.
    Raises UsageError if there is none, or if srun has started us several times.
    """
    wanted = values[o.BACKEND]
    silent = choose_host_option(values) is None and not _meets_elsewhere(values)
    if wanted not in ("auto", "slurm") or (wanted == "auto" and not silent):
        return None
    allocation = read_allocation(environ)
    if allocation is None:
        if wanted == "slurm":
            raise UsageError(
                "--backend slurm works inside an allocation only: start it with sbatch or salloc"
            )
        return None
    if allocation.step_tasks > 1:
        raise UsageError(
            f"srun has started elasticrun {allocation.step_tasks} times; start it once, from the "
            "batch script: it starts its own agents on the nodes"
        )
    return allocation


def check_nodes(allocation: SlurmAllocation, hosts: Hosts, source: str) -> None:
    """Raise UsageError if a host that was named is no node of the allocation."""
    for host, _ in hosts:
        if host not in allocation.nodes:
            raise UsageError(
                f"{host} ({source}) is not in {allocation.source}, whose nodes are "
                f"{', '.join(allocation.nodes[:_SHOWN])}"
                f"{', …' if len(allocation.nodes) > _SHOWN else ''}"
            )


def check_alone(values: OptionValues, environ: Mapping[str, str]) -> None:
    """Raise UsageError if mpirun has started several of us, each of which would be a job."""
    ranks = started_ranks(environ)
    if ranks > 1 and values[o.BACKEND] != "mpi" and not _meets_elsewhere(values):
        raise UsageError(
            f"mpirun has started elasticrun {ranks} times, which would be as many jobs; say "
            "--backend mpi for one job of all ranks, or start it once"
        )


def _meets_elsewhere(values: OptionValues) -> bool:
    """Return whether the same command is meant to run on several nodes, as with torchrun."""
    return bool(values.level(o.NNODES) and values.level(o.RDZV_ENDPOINT))
