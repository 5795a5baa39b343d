"""What a command line amounts to: settings, workers' command, hosts. Pure; nothing is started.

`launcher.job` collects the facts of this machine, calls `make_plan`, and carries the plan out,
or prints `LaunchPlan.render()` for --dry-run. A plan holds no secret: the values of `--env` are
in the job's specification, and are not rendered.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec
from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.runtime.host_lists import Hosts, parse_host_lines, parse_hosts
from elastic_driver.settings import Settings
from launcher import options as o
from launcher.backends.slurm_allocation import Allocation
from launcher.commandline.values import CommandLine, Values
from launcher.plan.forwarded import forwarded
from launcher.plan.joined import JoinedHosts, joined_hosts, joining_note
from launcher.plan.placing import (
    check_alone,
    check_nodes,
    choose_allocation,
    choose_host_option,
)
from launcher.plan.role import Serve
from launcher.plan.sizes import (
    Machine,
    Size,
    Wish,
    bounds_of_hosts,
    decide_size,
    enough_hosts,
    read_wish,
    slots_of_a_host,
)
from launcher.plan.tensorflow import TF_PORTS, check_tf_roles, tf_roles, warm_processes

THIS_MACHINE = "localhost"


class Facts(Struct, frozen=True):
    """What planning has to know from outside."""

    run_id: str
    state_dir: str
    cwd: str
    python: str  # the interpreter that runs `script.py` and `-m module`
    machine: Machine
    hostfile_text: str | None = None  # what stands in --hostfile, where one is given
    environ: dict[str, str] = {}
    ranks: Hosts | None = None  # where mpirun has started us, a slot for each rank
    role: Serve | None = None  # this node serves a job whose nodes join by themselves
    name: str = THIS_MACHINE  # what it is called among them


class FixedHosts(Struct, frozen=True):
    """These hosts for the whole job, or as long as the Slurm job `allocation` has them."""

    hosts: Hosts
    source: str
    allocation: str | None = None


class FileHosts(Struct, frozen=True):
    """A hostfile that is read again when it changes; `hosts` is what it says now."""

    path: str
    default_slots: int
    hosts: Hosts


class ScriptHosts(Struct, frozen=True):
    """A program that prints the hosts there are."""

    path: str
    default_slots: int
    timeout: float


HostSource: TypeAlias = FixedHosts | FileHosts | ScriptHosts | JoinedHosts


class NodeCheckPlan(Struct, frozen=True):
    """How the nodes are to be checked before the job starts."""

    performance: bool  # show bandwidth and latency
    stragglers: bool  # look for slow nodes
    exclude_stragglers: bool
    timeout: float  # seconds for a round's task
    every_slot: bool  # a process for each slot (a GPU each), not one for each host

    def describe(self) -> str:
        """What is checked, in words."""
        slow = "excluded" if self.exclude_stragglers else "named"
        return f"faulty hosts are excluded{f', slow ones {slow}' if self.stragglers else ''}"


class LaunchPlan(Struct, frozen=True):
    """Everything needed to start the job."""

    settings: Settings
    spec: JobSpec
    hosts: HostSource
    discovery_interval: float  # seconds
    backend: str
    bind: tuple[str, int]  # where the rendezvous listens; port 0: any free one
    state_dir: str
    verbosity: int  # -1 quiet, 0, 1 verbose
    log_format: str
    debug: bool
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    node_check: NodeCheckPlan | None = None  # None: none was asked for
    allocation: Allocation | None = None  # Slurm's, that the agents are started in
    forwarded: tuple[str, ...] = ()  # variables of this shell that other hosts' workers get
    interfaces: tuple[str, ...] = ()  # that the workers and the rendezvous are to use
    notes: tuple[str, ...] = ()
    origins: tuple[tuple[str, str, str], ...] = ()  # (option, value, who said so)

    def backend_job(self, environ: Mapping[str, str], hosts: Hosts = ()) -> BackendJob:
        """Return what a backend is told, as far as it is known before the rendezvous is up."""
        return BackendJob(
            cwd=self.spec.cwd,
            hosts=hosts,
            grows=isinstance(self.hosts, ScriptHosts),
            environ=environ,
            heartbeat_timeout=self.settings.heartbeat_timeout,
            ssh_port=self.ssh_port,
            ssh_identity_file=self.ssh_identity_file,
            allocation=None if self.allocation is None else self.allocation.job_id,
        )

    def render(self, *, origins: bool = False, agents: Sequence[tuple[str, str]] = ()) -> str:
        """Return the plan for people, one thing a line.

        With `origins` also who set which option; `agents`: what would run on which host.
        """
        s, spec = self.settings, self.spec
        most = "any number" if s.max_np is None else str(s.max_np)
        bind = (
            f"{self.bind[0]}:{self.bind[1]}" if self.bind[1] else f"{self.bind[0]}, any free port"
        )
        lines = [
            ("command", shlex.join(spec.command)),
            ("in", spec.cwd),
            ("hosts", describe_hosts(self.hosts)),
            ("workers", f"start with {s.start_np}, go on with {s.min_np} or more, at most {most}"),
            ("backend", self.backend),
            ("rendezvous", bind),
            ("events", f"{self.state_dir}/{spec.run_id}/events.jsonl"),
            ("logs", spec.log_dir or "terminal only"),
        ]
        if self.node_check is not None:
            lines.append(("check", self.node_check.describe()))
        lines += [("agent", f"on {host}: {what}") for host, what in agents]
        own = sorted(set(spec.env) - set(self.forwarded))
        for label, names in (("variables", own), ("passed on", self.forwarded)):
            if names:
                lines.append((label, " ".join(names)))
        lines += [("note", note) for note in self.notes]
        if origins:
            lines += [
                ("set", f"{name} {value}  ({source})") for name, value, source in self.origins
            ]
        return "\n".join(f"{label:<11} {text}" for label, text in lines)


def make_plan(line: CommandLine, facts: Facts) -> LaunchPlan:
    """The plan for a command line.

    Raises:
        UsageError: options contradict each other, or there is no command (exit 64).
        ClusterError: the hosts listed can never be enough (exit 75).
    """
    values = line.values
    if values[o.QUIET] and values[o.VERBOSE]:
        raise UsageError("-q and -v contradict each other; keep one of them")
    allocation = None
    if facts.role is None:
        check_alone(values, facts.environ)
        allocation = choose_allocation(values, facts.environ)
    machine = facts.machine if allocation is None else _node(allocation, facts.machine)
    slots = slots_of_a_host(values, machine)
    wish = read_wish(values, slots)
    hosts: HostSource
    if facts.role is not None:
        hosts = joined_hosts(values, facts.name, facts.role, slots)
        if slots is None and not facts.role.own and values.level(o.NNODES):
            wish = replace(wish, most=None)  # nodes say how many workers they have
    else:
        hosts = _choose_hosts(values, facts, slots, wish, allocation)
    capacity = None
    if isinstance(hosts, FixedHosts | FileHosts):
        capacity = sum(n for _, n in hosts.hosts)
        if allocation is not None:
            check_nodes(allocation, hosts.hosts, source_of(hosts))
    size = decide_size(wish, capacity, describe_hosts(hosts))
    settings = _settings(values, size, fixed_hosts=isinstance(hosts, FixedHosts))
    if isinstance(hosts, FixedHosts):
        enough_hosts(settings, sum(1 for _, n in hosts.hosts if n), describe_hosts(hosts))
    check_tf_roles(settings)
    interfaces = values[o.NETWORK_INTERFACES]
    backend = "slurm" if allocation is not None else _backend(values, hosts)
    passed_on = {} if backend in ("local", "join") else forwarded(facts.environ)
    spec, unset = _spec(values, settings, facts, worker_command(line.command, facts.python))
    return LaunchPlan(
        settings=settings,
        spec=replace(spec, env={**passed_on, **spec.env}),
        hosts=hosts,
        # Nodes that join are told of; whoever asks for them waits until there is news.
        discovery_interval=0.0 if facts.role else values[o.DISCOVERY_INTERVAL],
        backend=backend,
        allocation=allocation,
        forwarded=tuple(name for name in passed_on if name not in spec.env),
        ssh_port=values[o.SSH_PORT],
        ssh_identity_file=values[o.SSH_IDENTITY_FILE],
        node_check=_node_check(values, machine),
        interfaces=() if interfaces is None else interfaces,
        bind=(facts.role.host, facts.role.port) if facts.role else values[o.RDZV_ENDPOINT],
        state_dir=facts.state_dir,
        verbosity=values[o.VERBOSE] - values[o.QUIET],
        log_format=values[o.LOG_FORMAT],
        debug=values[o.DEBUG],
        notes=tuple(filter(None, (*line.warnings, size.note, *unset, joining_note(hosts)))),
        origins=values.origins(),
    )


def worker_command(command: tuple[str, ...], python: str) -> tuple[str, ...]:
    """argv of a worker: scripts and modules by `python`, everything else as it stands."""
    if not command:
        raise UsageError("no command to run; say elasticrun [OPTIONS] -- script.py [ARGS…]")
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError("-m needs the name of a module: elasticrun [OPTIONS] -m MODULE")
        return (python, *command)
    if not command[0]:
        raise UsageError("the command is an empty word; is a shell variable not set?")
    return (python, *command) if command[0].endswith(".py") else command


def describe_hosts(hosts: HostSource) -> str:
    """The hosts in words."""
    if isinstance(hosts, ScriptHosts):
        return f"found by {hosts.path}"
    if isinstance(hosts, JoinedHosts):
        return hosts.describe()
    shown = ", ".join(f"{host}:{slots}" for host, slots in hosts.hosts[:8])
    more = f" and {len(hosts.hosts) - 8} more" if len(hosts.hosts) > 8 else ""
    return f"{shown}{more} ({source_of(hosts)})"


def source_of(hosts: FixedHosts | FileHosts) -> str:
    """Who names these hosts."""
    return hosts.source if isinstance(hosts, FixedHosts) else hosts.path


# ---- parts -------------------------------------------------------------------------------


def _node(allocation: Allocation, here: Machine) -> Machine:
    """What a node of the allocation has; this machine may be the one people log in on."""
    return Machine(cpus=allocation.cpus or here.cpus, gpus=allocation.gpus)


def _choose_hosts(
    values: Values, facts: Facts, slots: int | None, wish: Wish, allocation: Allocation | None
) -> HostSource:
    """Where the option that counts says, else the allocation's nodes, else this machine."""
    wanted = wish.most or wish.asked or wish.least
    chosen = choose_host_option(values)
    if chosen is None and facts.ranks is not None:
        return FixedHosts(facts.ranks, "the ranks of mpirun")
    if chosen is None and allocation is not None:
        return FixedHosts(allocation.hosts(slots, wanted), allocation.source, allocation.job_id)
    if chosen is o.HOST_DISCOVERY_SCRIPT:
        return ScriptHosts(
            path=str(values[o.HOST_DISCOVERY_SCRIPT]),
            default_slots=slots or 1,
            timeout=values[o.DISCOVERY_TIMEOUT],
        )
    if chosen is o.HOSTS_LIST:
        text = str(values[o.HOSTS_LIST])
        return FixedHosts(parse_hosts(text, default_slots=slots or 1), "--hosts")
    if chosen is o.HOSTFILE:
        path = str(values[o.HOSTFILE])
        text = facts.hostfile_text or ""
        found = parse_host_lines(text, default_slots=slots or 1, source=path)
        return FileHosts(path, slots or 1, found)
    here = slots or wanted or 1
    return FixedHosts(((THIS_MACHINE, here),), "this machine")


def _settings(values: Values, size: Size, *, fixed_hosts: bool) -> Settings:
    least_hosts, most_hosts = bounds_of_hosts(values)
    return Settings(
        fixed_hosts=fixed_hosts,
        start_np=size.start_np,
        min_np=size.min_np,
        max_np=size.max_np,
        start_min_np=size.start_min_np,
        node_unit=values[o.NODE_UNIT],
        min_hosts=least_hosts,
        max_hosts=most_hosts,
        reset_limit=values[o.RESET_LIMIT],
        max_restarts=values[o.MAX_RESTARTS],
        fruitless_restarts=values[o.FRUITLESS_RESTARTS],
        host_failures=values[o.HOST_FAILURES],
        host_failure_window=values[o.HOST_FAILURE_WINDOW],
        blacklist_cooldown=values[o.BLACKLIST_COOLDOWN_RANGE],
        elastic_timeout=values[o.ELASTIC_TIMEOUT],
        start_timeout=values[o.START_TIMEOUT],
        heartbeat_timeout=values[o.HEARTBEAT_TIMEOUT],
        hang_timeout=values[o.HANG_TIMEOUT],
        grace_period=values[o.GRACE_PERIOD],
        stop_grace=values[o.STOP_GRACE],
        last_call=values[o.LAST_CALL],
        tf_roles=tf_roles(values),
        replace_slow=values[o.REPLACE_SLOW],
    )


def _spec(
    values: Values, settings: Settings, facts: Facts, command: tuple[str, ...]
) -> tuple[JobSpec, list[str]]:
    """What the workers run, and remarks on variables that are not set."""
    given = {
        name: facts.environ.get(name, value) if value is None else value
        for name, value in values[o.ENV]
    }
    unset = [
        f"-x {name}: it is not set here, and is not passed on"
        for name, value in given.items()
        if value is None
    ]
    env = {name: value for name, value in given.items() if value is not None}
    interfaces = values[o.NETWORK_INTERFACES]
    if interfaces:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, ",".join(interfaces))
    virtual = values[o.VIRTUAL_WORKERS] or settings.max_np
    if virtual is not None:
        env[contract.VIRTUAL_WORKERS] = str(virtual)
    if values[o.BALANCE]:
        env[contract.BALANCE] = "1"
    spec = JobSpec(
        run_id=facts.run_id,
        command=command,
        cwd=facts.cwd,
        env=env,
        heartbeat_timeout=settings.heartbeat_timeout,
        grace_period=settings.stop_grace,
        max_restarts=settings.max_restarts or 0,
        log_dir=values[o.LOG_DIR],
        redirects=values[o.REDIRECTS],
        tee=values[o.TEE],
        local_ranks_filter=values[o.LOCAL_RANKS_FILTER],
        timestamp=values[o.PREFIX_OUTPUT_WITH_TIMESTAMP],
        warm=warm_processes(values),
        preload=values[o.PRELOAD],
        hang_timeout=settings.hang_timeout,
        leave_notice=settings.grace_period,
        slot_ports=0 if settings.tf_roles is None else TF_PORTS,
    )
    return spec, unset


def _node_check(values: Values, machine: Machine) -> NodeCheckPlan | None:
    """Each of the four flags asks for the check; the later ones for more of it."""
    exclude = values[o.EXCLUDE_STRAGGLER]
    slow = values[o.STRAGGLER_DETECTION] or exclude
    performance = values[o.COMM_PERF_TEST]
    if not (values[o.NETWORK_CHECK] or performance or slow):
        return None
    return NodeCheckPlan(
        performance=performance,
        stragglers=slow,
        exclude_stragglers=exclude,
        timeout=values[o.CHECK_TIMEOUT],
        every_slot=machine.gpus > 0,
    )


def _backend(values: Values, hosts: HostSource) -> str:
    wanted = values[o.BACKEND]
    if isinstance(hosts, JoinedHosts):
        if wanted != "auto":
            raise UsageError(f"--backend {wanted} starts agents, and these nodes start their own")
        return "join"
    alone = isinstance(hosts, FixedHosts) and all(host == THIS_MACHINE for host, _ in hosts.hosts)
    return "local" if alone and wanted == "auto" else wanted
