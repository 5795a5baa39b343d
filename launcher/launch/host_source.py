"""The hosts of a job, and the role of this node if the nodes start by themselves. Pure.

An option, Slurm or mpirun names the hosts. Or each node is started by the same command and serves
or joins: with --serve and --join; as in torchrun with --rdzv-endpoint on every node, or with
--node-rank, --master-addr and --master-port; or with the variables that mean the same (Kubeflow's
PyTorchJob sets them, with WORLD_SIZE as the number of nodes).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from elastic_driver.contract import PortRange
from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import Hosts, parse_host_lines, parse_hosts
from launcher.backends.mpi_ranks import started_ranks
from launcher.backends.slurm_allocation import SlurmAllocation, read_allocation
from launcher.options.given import CommandLine, Setting

THIS_MACHINE = "localhost"
RENDEZVOUS_PORT = 29400  # torchrun's default, and ours for --serve and --join
MASTER_PORT = 29500  # torch's default for MASTER_PORT
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - names that a user may give; nothing is bound here
HOSTFILE, SCRIPT = "hostfile", "script"  # discoveries with an option of their own
# The options that name hosts, by field.
_HOST_OPTIONS = ("standalone", "host_discovery", "host_discovery_script", "hosts", "hostfile")
_SHOWN = 8  # entries of a long list in a message


@dataclass(frozen=True)
class Serve:
    """The role of the node that runs the driver; `own`: workers run on this node too."""

    host: str
    port: int
    own: bool
    by_name: bool = False  # this node serves because HOST is its name: another process may do so


@dataclass(frozen=True)
class Join:
    """The role of a node that joins the job at this address."""

    host: str
    port: int
    because: str = field(default="", compare=False)  # what makes this node join, if no option does


@dataclass(frozen=True)
class MachineFacts:
    """The processors of a machine, for `--nproc-per-node auto`."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Facts:
    """Facts about this machine and its environment that the plan depends on."""

    run_id: str
    state_dir: str
    cwd: str
    python: str  # the interpreter that runs `script.py` and `-m module`
    machine: MachineFacts
    hostfile_text: str | None = None  # the text of the hostfile, if one is given
    environ: Mapping[str, str] = field(default_factory=dict)
    ranks: Hosts | None = None  # if mpirun has started us: a slot for each rank
    role: Serve | None = None  # this node serves a job whose nodes join by themselves
    name: str = THIS_MACHINE  # this node's name among the nodes of such a job
    allocation_text: str = ""  # what scontrol shows of the Slurm job that we run in


@dataclass(frozen=True)
class FixedHosts:
    """These hosts for the whole job, or as long as the Slurm job `allocation` has them."""

    hosts: Hosts
    source: str
    allocation: str | None = None


@dataclass(frozen=True)
class DiscoveredHosts:
    """Hosts that a discovery finds, again and again; `hosts`: those that are known now."""

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


@dataclass(frozen=True)
class JoinedHosts:
    """Nodes that join by themselves, and the server's own node if it trains too."""

    role: Serve
    own: Hosts
    default_slots: int  # of a node that does not name a number
    hosts: None = None  # no host is known before it joins


@dataclass(frozen=True)
class BrainHosts:
    """Hosts that the Brain at this address grants the job."""

    url: str
    hosts: None = None  # no host is known before the first grant


HostSource: TypeAlias = FixedHosts | DiscoveredHosts | JoinedHosts | BrainHosts


def describe_hosts(source: HostSource) -> str:
    """Return the hosts in words."""
    if isinstance(source, BrainHosts):
        return f"granted by the Brain at {source.url}"
    if isinstance(source, JoinedHosts):
        own = "".join(f"{host}:{slots} (this node), and " for host, slots in source.own)
        return f"{own}nodes that join {source.role.host}:{source.role.port}"
    if source.hosts is None:
        return f"found by {source.source}"
    shown = ", ".join(f"{host}:{slots}" for host, slots in source.hosts[:_SHOWN])
    more = len(source.hosts) - _SHOWN
    return f"{shown}{f' and {more} more' if more > 0 else ''} ({source.source})"


# ---- the source of hosts -----------------------------------------------------------------


def choose_hosts(
    line: CommandLine,
    facts: Facts,
    slots: int | None,
    wanted: tuple[int | None, int | None],
    allocation: SlurmAllocation | None,
) -> HostSource:
    """Return the hosts that an option names, else mpirun's or the allocation's, else this machine.

    Args:
        line: the command line.
        facts: the facts of this machine.
        slots: the slots of a host that is listed without a number, if an option sets them.
        wanted: the workers without which the whole job does not start, and those that it may
            start with, if options set these numbers.
        allocation: the Slurm allocation that agents are started in.

    Raises UsageError for a host that is no node of the allocation.
    """
    options, default = line.options, slots or 1
    if options.brain is not None:
        return BrainHosts(options.brain)
    if facts.role is not None:
        own = ((facts.name, default),) if facts.role.own else ()
        return JoinedHosts(facts.role, own, default)
    chosen = choose_host_option(line)
    if chosen is None and facts.ranks is not None:
        return FixedHosts(facts.ranks, "the ranks of mpirun")
    if chosen is None and allocation is not None:
        per_node = line.options.nproc_per_node
        each = per_node if isinstance(per_node, str) else slots
        found = allocation.hosts(each, *wanted)
        return FixedHosts(found, allocation.source, allocation.job_id)
    source: FixedHosts | DiscoveredHosts
    if named := choose_discovery(line):
        (name, argument), known = named, None
        if name == HOSTFILE:
            text = facts.hostfile_text or ""
            known = parse_host_lines(text, default_slots=default, source=argument)
        source = DiscoveredHosts(name, argument, default, options.discovery_timeout, known)
    elif chosen == "hosts":
        hosts = parse_hosts(str(options.hosts), default_slots=default)
        source = FixedHosts(hosts, "--hosts")
    else:
        source = FixedHosts(((THIS_MACHINE, slots or wanted[1] or wanted[0] or 1),), "this machine")
    if allocation is not None:
        _check_nodes(allocation, source)
    return source


def _host_options(line: CommandLine) -> list[str]:
    return [name for name in _HOST_OPTIONS if line[name]]


def choose_host_option(line: CommandLine) -> str | None:
    """Return the option that names the hosts; None: no option does.

    An option of the command line wins over a variable, and a variable over the file. Raises
    UsageError for two options of the same source.
    """
    named = sorted(_host_options(line), key=line.level, reverse=True)
    if len(named) > 1 and line.level(named[0]) == line.level(named[1]):
        first, second = (f"--{name.replace('_', '-')}" for name in named[:2])
        raise UsageError(f"{first} and {second} both say where to run; keep one of them")
    return named[0] if named else None


def choose_discovery(line: CommandLine) -> tuple[str, str] | None:
    """Return the name and the argument of the discovery of the hosts; None: there is none."""
    chosen = choose_host_option(line) or ""
    if chosen == "host_discovery":
        name, _, argument = str(line.options.host_discovery).partition(":")
        return name, argument
    own = {"host_discovery_script": SCRIPT, "hostfile": HOSTFILE}.get(chosen)
    return None if own is None else (own, line[chosen])


# ---- a Brain's cluster -------------------------------------------------------------------

# Options that say what the Brain decides, or that a job of a Brain cannot have yet, by field.
_NOT_WITH_BRAIN = ("num_proc", "nnodes", "node_unit", "auto_scale", "spares", "serve", "join")
_CHECKS = ("network_check", "comm_perf_test", "straggler_detection", "exclude_straggler")
_OF_BRAIN = ("brain_token_file", "brain_fallback", "weight")


def check_brain_options(line: CommandLine) -> None:
    """Raise UsageError for an option that does not go with --brain, or without it."""
    options = line.options
    if options.brain is None:
        for field_name in _OF_BRAIN:
            if line.level(field_name):
                raise UsageError(f"{_flag(field_name)} needs the address of a Brain: --brain URL")
        return
    for field_name in (*_NOT_WITH_BRAIN, *_CHECKS):
        if line.level(field_name) and line[field_name]:
            raise UsageError(
                f"{_flag(field_name)} cannot be given with --brain: the Brain decides the number "
                "of workers and their hosts; limit them with --min-np and --max-np"
            )
    if (named := _host_options(line)) and not options.brain_fallback:
        raise UsageError(
            f"{_flag(named[0])} names hosts, and the hosts of a job with --brain are the Brain's; "
            "leave it out, or add --brain-fallback to use these hosts when the Brain is away"
        )


def without_brain(line: CommandLine) -> CommandLine:
    """Return the line of a job that finds its Brain away: with its own hosts, and --auto-scale."""
    for name, value in (("brain", None), ("brain_fallback", False)):
        line = line.having(name, Setting(value, ""))
    for name in ("brain_token_file", "weight"):
        line = line.having(name, Setting(line[name], ""))
    return line.having("auto_scale", Setting(True, "", "--brain-fallback", 1))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---- Slurm and mpirun --------------------------------------------------------------------


def choose_allocation(
    line: CommandLine, environ: Mapping[str, str], detail: str = ""
) -> SlurmAllocation | None:
    """Return the Slurm allocation in which the agents are started; None: none.

    `detail` is what scontrol shows of it.

    That is so with --backend slurm, and with --backend auto if no option names hosts. Raises
    UsageError if there is no allocation for --backend slurm, or if mpirun or srun has started us
    several times, each of which would be a job.
    """
    backend = line.options.backend
    ranks = started_ranks(environ)
    elsewhere = _elsewhere(line)
    if ranks > 1 and backend != "mpi" and not elsewhere:
        raise UsageError(
            f"mpirun has started elasticrun {ranks} times, which would be {ranks} jobs; use "
            "--backend mpi for one job of all ranks, or start it once"
        )
    if not may_use_allocation(line):
        return None
    allocation = read_allocation(environ, detail)
    if allocation is None and backend == "slurm":
        raise UsageError(
            "--backend slurm works inside an allocation only: start it with sbatch or salloc"
        )
    if allocation is not None and allocation.step_tasks > 1:
        raise UsageError(
            f"srun has started elasticrun {allocation.step_tasks} times; start it once, from the "
            "batch script: it starts its own agents on the nodes"
        )
    return allocation


def may_use_allocation(line: CommandLine) -> bool:
    """Return whether agents are started in a Slurm allocation, if there is one."""
    backend = line.options.backend
    silent = choose_host_option(line) is None and not _elsewhere(line)
    return backend == "slurm" or (backend == "auto" and silent)


def _elsewhere(line: CommandLine) -> bool:
    """Return whether the same command is meant to run on several nodes, with torchrun's options."""
    return bool(line.level("nnodes") and line.level("rdzv_endpoint"))


def _check_nodes(allocation: SlurmAllocation, source: FixedHosts | DiscoveredHosts) -> None:
    """Raise UsageError if a host that was named is no node of the allocation."""
    nodes = ", ".join(allocation.nodes[:_SHOWN]) + ", …" * (len(allocation.nodes) > _SHOWN)
    for host, _ in source.hosts or ():
        if host not in allocation.nodes:
            raise UsageError(
                f"{host} ({source.source}) is not in {allocation.source}, whose nodes are {nodes}"
            )


# ---- nodes that start by themselves ------------------------------------------------------


def decide_role(
    line: CommandLine, environ: Mapping[str, str], can_serve: Callable[[str, int], bool]
) -> Serve | Join | None:
    """Return the node's role; None: this process starts the agents of all hosts.

    `can_serve` tells whether a host is this machine and the port is free here. Raises UsageError if
    options contradict each other, or a variable makes no sense.
    """
    options = line.options
    hosts = _host_options(line)
    host, port = options.rdzv_endpoint
    endpoint_given = bool(line.level("rdzv_endpoint"))
    if options.serve or options.join is not None:
        if hosts:
            named = hosts[0].replace("_", "-")
            flag = "--serve" if options.serve else "--join"
            raise UsageError(f"--{named} names hosts, and with {flag} they join by themselves")
        if options.join is None:
            host = host if endpoint_given else ANYWHERE[0]
            return Serve(host, port or _usual_port(line, RENDEZVOUS_PORT), own=False)
        if options.serve:
            raise UsageError("--serve and --join contradict each other; use one of them")
        return Join(options.join[0], options.join[1] or _usual_port(line, RENDEZVOUS_PORT))
    if hosts or options.nnodes is None or options.nnodes[1] == 1:
        return None
    rank = options.node_rank
    if not endpoint_given:
        rank = _rank(environ) if rank is None else rank
        master = options.master_addr or environ.get("MASTER_ADDR")
        if master is None and options.node_rank is None:
            return None  # no option and no variable names node 0
        host = (master or "127.0.0.1").strip("[]")
        port = options.master_port or 0
        if options.master_port is None and "MASTER_PORT" in environ:
            port = _number(environ, "MASTER_PORT")
        port = port or _usual_port(line, MASTER_PORT)
    port = port or _usual_port(line, RENDEZVOUS_PORT)
    if rank is not None:
        because = "" if options.node_rank is not None else _because(environ)
        return Serve(host, port, own=True) if rank == 0 else Join(host, port, because)
    if host in ANYWHERE or can_serve(host, port):
        return Serve(host, port, own=True, by_name=host not in ANYWHERE)
    return Join(host, port)


def _usual_port(line: CommandLine, usual: int) -> int:
    """Return the port of a server whose port nothing names: the last of --ports, if not `usual`."""
    ports: PortRange | None = line["ports"]
    return usual if ports is None or ports[0] <= usual <= ports[1] else ports[1]


def with_node_count(line: CommandLine, environ: Mapping[str, str]) -> CommandLine:
    """Return the line with --nnodes from WORLD_SIZE if no option sets the size.

    Only if all variables of PyTorchJob are there, and this is no worker of another launcher.
    """
    sizes = ("nnodes", "num_proc", "min_np", "max_np", "standalone", "serve", "join")
    complete = "MASTER_ADDR" in environ and "WORLD_SIZE" in environ
    if not complete or any(map(line.level, sizes)) or _rank(environ) is None or _host_options(line):
        return line
    nodes = _number(environ, "WORLD_SIZE")
    if nodes < 2:
        return line
    return line.having("nnodes", Setting((nodes, nodes), str(nodes), "WORLD_SIZE", 2))


def _rank(environ: Mapping[str, str]) -> int | None:
    """Return this node's number; RANK is a worker's if there is a LOCAL_RANK beside it."""
    names = _rank_names(environ)
    return next((_number(environ, name) for name in names if name in environ), None)


def _rank_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    return ("NODE_RANK",) if "LOCAL_RANK" in environ else ("NODE_RANK", "RANK")


def _because(environ: Mapping[str, str]) -> str:
    """Return the variables that make this node one of several."""
    names = [*_rank_names(environ), "MASTER_ADDR", "MASTER_PORT"]
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise UsageError(f"the variable {name} is {text[:40]!r}, and should be a whole number")
    return int(text)
