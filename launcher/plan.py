"""What a command line amounts to: settings, workers' command, hosts. Pure; nothing is started.

`launcher.job` collects the facts of this machine, calls `make_plan`, and carries the plan out,
or prints `LaunchPlan.render()` for --dry-run. A plan holds no secret: the values of `--env` are
in the job's specification, and are not rendered.
"""

from __future__ import annotations

import shlex
from typing import Any, TypeAlias

from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.messages import JobSpec
from elastic_driver.errors import UsageError
from elastic_driver.runtime.hostlist import Hosts, parse_host_lines, parse_hosts
from elastic_driver.settings import Settings
from launcher import options as o
from launcher.commandline import CommandLine, Values
from launcher.options import Option
from launcher.sizes import (
    Machine,
    Size,
    Wish,
    bounds_of_hosts,
    decide_size,
    enough_hosts,
    read_wish,
    slots_of_a_host,
)
from launcher.tensorflow import TF_PORTS, check_tf_roles, tf_roles, warm_processes

THIS_MACHINE = "localhost"


class Facts(Struct, frozen=True):
    """What planning has to know from outside."""

    run_id: str
    state_dir: str
    cwd: str
    python: str  # the interpreter that runs `script.py` and `-m module`
    machine: Machine
    hostfile_text: str | None = None  # what stands in --hostfile, where one is given


class FixedHosts(Struct, frozen=True):
    """These hosts for the whole job."""

    hosts: Hosts
    source: str


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


HostSource: TypeAlias = FixedHosts | FileHosts | ScriptHosts


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
    interfaces: tuple[str, ...] = ()  # that the workers and the rendezvous are to use
    notes: tuple[str, ...] = ()
    origins: tuple[tuple[str, str, str], ...] = ()  # (option, value, who said so)

    def render(self, *, origins: bool = False) -> str:
        """The plan for people, one thing a line; with `origins` also who set which option."""
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
        if spec.env:
            lines.append(("variables", " ".join(sorted(spec.env))))
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
    slots = slots_of_a_host(values, facts.machine)
    wish = read_wish(values, slots)
    hosts = _choose_hosts(values, facts, slots, wish)
    capacity = None if isinstance(hosts, ScriptHosts) else sum(n for _, n in hosts.hosts)
    size = decide_size(wish, capacity, describe_hosts(hosts))
    settings = _settings(values, size)
    if isinstance(hosts, FixedHosts):
        enough_hosts(settings, sum(1 for _, n in hosts.hosts if n), describe_hosts(hosts))
    check_tf_roles(settings)
    interfaces = values[o.NETWORK_INTERFACES]
    return LaunchPlan(
        settings=settings,
        spec=_spec(values, settings, facts, worker_command(line.command, facts.python)),
        hosts=hosts,
        discovery_interval=values[o.DISCOVERY_INTERVAL],
        backend=_backend(values, hosts),
        ssh_port=values[o.SSH_PORT],
        ssh_identity_file=values[o.SSH_IDENTITY_FILE],
        node_check=_node_check(values, facts.machine),
        interfaces=() if interfaces is None else interfaces,
        bind=values[o.RDZV_ENDPOINT],
        state_dir=facts.state_dir,
        verbosity=values[o.VERBOSE] - values[o.QUIET],
        log_format=values[o.LOG_FORMAT],
        debug=values[o.DEBUG],
        notes=(*line.warnings, *([size.note] if size.note else [])),
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
    shown = ", ".join(f"{host}:{slots}" for host, slots in hosts.hosts[:8])
    more = f" and {len(hosts.hosts) - 8} more" if len(hosts.hosts) > 8 else ""
    return f"{shown}{more} ({hosts.source if isinstance(hosts, FixedHosts) else hosts.path})"


# ---- parts -------------------------------------------------------------------------------


def _choose_hosts(values: Values, facts: Facts, slots: int | None, wish: Wish) -> HostSource:
    """The one source of hosts that counts: the highest level's; two of one level contradict."""
    kinds: tuple[Option[Any], ...] = (
        o.STANDALONE,
        o.HOST_DISCOVERY_SCRIPT,
        o.HOSTS_LIST,
        o.HOSTFILE,
    )
    named = sorted((x for x in kinds if values[x]), key=values.level, reverse=True)
    if len(named) > 1 and values.level(named[0]) == values.level(named[1]):
        raise UsageError(
            f"{named[0].long} and {named[1].long} both say where to run; keep one of them"
        )
    chosen = named[0] if named else o.STANDALONE
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
    here = slots or wish.most or wish.asked or wish.least or 1
    return FixedHosts(((THIS_MACHINE, here),), "this machine")


def _settings(values: Values, size: Size) -> Settings:
    least_hosts, most_hosts = bounds_of_hosts(values)
    return Settings(
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
    )


def _spec(values: Values, settings: Settings, facts: Facts, command: tuple[str, ...]) -> JobSpec:
    given = values[o.ENV]
    env = dict(given)
    interfaces = values[o.NETWORK_INTERFACES]
    if interfaces:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, ",".join(interfaces))
    virtual = values[o.VIRTUAL_WORKERS] or settings.max_np
    if virtual is not None:
        env[contract.VIRTUAL_WORKERS] = str(virtual)
    if values[o.BALANCE]:
        env[contract.BALANCE] = "1"
    return JobSpec(
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
    if wanted not in ("auto", "local", "ssh"):
        raise UsageError(
            f"--backend {wanted} does not exist yet; use ssh, or local for this machine alone"
        )
    alone = isinstance(hosts, FixedHosts) and all(host == THIS_MACHINE for host, _ in hosts.hosts)
    return "local" if alone and wanted == "auto" else wanted
