"""From the values of the options and the facts of this machine to a plan. Pure.

`launcher.job` collects the facts, calls `make_plan`, and carries the plan out or prints
`LaunchPlan.render()` for --dry-run. The values of `--env` are in the job's specification, and are
not rendered: they may be secrets.
"""

import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from elastic_driver.core.documents import JobSpec
from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.options import DriverOptions
from elastic_driver.settings import Settings
from launcher.backends.slurm_allocation import SlurmAllocation
from launcher.options import table as o
from launcher.options.values import CommandLine, OptionValues
from launcher.plan import hosts as where
from launcher.plan import sizes
from launcher.plan.role import Serve
from launcher.plan.workers import check_tf_roles, forwarded, job_spec, tf_roles, worker_command


class Facts(Struct, frozen=True):
    """The facts that planning needs from outside."""

    run_id: str
    state_dir: str
    cwd: str
    python: str  # the interpreter that runs `script.py` and `-m module`
    machine: sizes.MachineFacts
    hostfile_text: str | None = None  # the text of the hostfile, if one is given
    environ: dict[str, str] = {}
    ranks: Hosts | None = None  # if mpirun has started us: a slot for each rank
    role: Serve | None = None  # this node serves a job whose nodes join by themselves
    name: str = where.THIS_MACHINE  # this node's name among them


class NodeCheckPlan(Struct, frozen=True):
    """The settings of the node check before the job."""

    performance: bool  # show bandwidth and latency
    stragglers: bool  # look for slow nodes
    exclude_stragglers: bool
    timeout: float  # seconds for a round's task
    every_slot: bool  # a process for each slot (a GPU each), not one for each host

    def describe(self) -> str:
        """Return what is checked, in words."""
        slow = "excluded" if self.exclude_stragglers else "named"
        return f"faulty hosts are excluded{f', slow ones {slow}' if self.stragglers else ''}"


class LaunchPlan(Struct, frozen=True):
    """Everything needed to start the job."""

    settings: Settings
    spec: JobSpec
    driver: DriverOptions  # `bind_host` may still be a name
    hosts: where.HostSource
    backend: str
    agents: BackendJob  # what the backend is told, as far as the options say it
    state_dir: str
    verbosity: int  # -1 quiet, 0, 1 verbose
    log_format: str
    node_check: NodeCheckPlan | None = None  # None: none was asked for
    forwarded: tuple[str, ...] = ()  # variables of this shell that other hosts' workers get
    interfaces: tuple[str, ...] = ()  # for the workers and the rendezvous
    notes: tuple[str, ...] = ()
    origins: tuple[tuple[str, str, str], ...] = ()  # (option, value, who said so)

    def backend_job(self, environ: Mapping[str, str], hosts: Hosts = ()) -> BackendJob:
        """Return what a backend is told before the rendezvous is up."""
        return replace(self.agents, environ=environ, hosts=hosts)

    def render(self, *, origins: bool = False, agents: Sequence[tuple[str, str]] = ()) -> str:
        """Return the plan for people, one thing a line.

        With `origins` also who set which option; `agents`: what would run on which host.
        """
        s, spec, driver = self.settings, self.spec, self.driver
        most = "any number" if s.max_np is None else str(s.max_np)
        port = f":{driver.bind_port}" if driver.bind_port else ", any free port"
        lines = [
            ("command", shlex.join(spec.command)),
            ("in", spec.cwd),
            ("hosts", where.describe_hosts(self.hosts)),
            ("workers", f"start with {s.start_np}, go on with {s.min_np} or more, at most {most}"),
            ("backend", self.backend),
            ("rendezvous", f"{driver.bind_host}{port}"),
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
            lines += [("set", f"{name} {value}  ({who})") for name, value, who in self.origins]
        return "\n".join(f"{label:<11} {text}" for label, text in lines)


def make_plan(line: CommandLine, facts: Facts) -> LaunchPlan:
    """Return the plan for a command line.

    Raises:
        UsageError: options contradict each other, or there is no command (exit 64).
        ClusterError: the hosts listed can never be enough (exit 75).
    """
    values, role = line.values, facts.role
    if values[o.QUIET] and values[o.VERBOSE]:
        raise UsageError("-q and -v contradict each other; keep one of them")
    allocation = None
    if role is None:
        where.check_alone(values, facts.environ)
        allocation = where.choose_allocation(values, facts.environ)
    machine = facts.machine
    if allocation is not None:  # this machine may be a login node
        machine = replace(machine, cpus=allocation.cpus or machine.cpus, gpus=allocation.gpus)
    hosts, size = _hosts_and_size(values, facts, sizes.slots_of_a_host(values, machine), allocation)
    settings = _settings(values, size, hosts)
    backend = "slurm" if allocation is not None else _backend(values, hosts)
    passed_on = {} if backend in ("local", "join") else forwarded(facts.environ)
    spec, unset = job_spec(
        values,
        settings,
        run_id=facts.run_id,
        command=worker_command(line.command, facts.python),
        cwd=facts.cwd,
        environ=facts.environ,
    )
    interfaces = values[o.NETWORK_INTERFACES]
    notes = (*line.warnings, size.note, *unset, getattr(hosts, "note", ""))
    return LaunchPlan(
        settings=settings,
        spec=replace(spec, env={**passed_on, **spec.env}),
        driver=_driver_options(values, role),
        hosts=hosts,
        backend=backend,
        agents=BackendJob(
            cwd=facts.cwd,
            grows=hosts.hosts is None,
            allocation=None if allocation is None else allocation.job_id,
            **values.fields("backend"),
        ),
        forwarded=tuple(name for name in passed_on if name not in spec.env),
        node_check=_node_check(values, machine),
        interfaces=() if interfaces is None else interfaces,
        state_dir=facts.state_dir,
        verbosity=values[o.VERBOSE] - values[o.QUIET],
        log_format=values[o.LOG_FORMAT],
        notes=tuple(filter(None, notes)),
        origins=values.origins(),
    )


# ---- parts -------------------------------------------------------------------------------


def _hosts_and_size(
    values: OptionValues, facts: Facts, slots: int | None, allocation: SlurmAllocation | None
) -> tuple[where.HostSource, sizes.JobSize]:
    """Return where the job runs and with how many workers."""
    wish, role = sizes.read_wish(values, slots), facts.role
    hosts: where.HostSource
    if role is not None:
        hosts = where.joined_hosts(values, facts.name, role, slots)
        if slots is None and not role.own and values.level(o.NNODES):
            wish = replace(wish, most=None)  # nodes say how many workers they have
    else:
        hosts = where.choose_hosts(
            values,
            slots=slots,
            wanted=wish.most or wish.asked or wish.least,
            hostfile_text=facts.hostfile_text,
            ranks=facts.ranks,
            allocation=allocation,
        )
    capacity = None
    if not isinstance(hosts, where.JoinedHosts) and hosts.hosts is not None:
        capacity = sum(n for _, n in hosts.hosts)
        if allocation is not None:
            where.check_nodes(allocation, hosts.hosts, hosts.source)
    return hosts, sizes.decide_size(wish, capacity, where.describe_hosts(hosts))


def _settings(values: OptionValues, size: sizes.JobSize, hosts: where.HostSource) -> Settings:
    least_hosts, most_hosts = sizes.bounds_of_hosts(values)
    settings = Settings(
        fixed_hosts=isinstance(hosts, where.FixedHosts),
        start_np=size.start_np,
        min_np=size.min_np,
        max_np=size.max_np,
        start_min_np=size.start_min_np,
        min_hosts=least_hosts,
        max_hosts=most_hosts,
        tf_roles=tf_roles(values),
        **values.fields("settings"),
    )
    if isinstance(hosts, where.FixedHosts):
        sizes.enough_hosts(
            settings, sum(1 for _, n in hosts.hosts if n), where.describe_hosts(hosts)
        )
    check_tf_roles(settings)
    return settings


def _driver_options(values: OptionValues, role: Serve | None) -> DriverOptions:
    host, port = (role.host, role.port) if role else values[o.RDZV_ENDPOINT]
    options = DriverOptions(bind_host=host, bind_port=port, **values.fields("driver"))
    # Nodes that join are reported at once: a question for hosts waits until there is news.
    return replace(options, discovery_interval=0.0) if role else options


def _node_check(values: OptionValues, machine: sizes.MachineFacts) -> NodeCheckPlan | None:
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


def _backend(values: OptionValues, hosts: where.HostSource) -> str:
    wanted = values[o.BACKEND]
    if isinstance(hosts, where.JoinedHosts):
        if wanted != "auto":
            raise UsageError(f"--backend {wanted} starts agents, and these nodes start their own")
        return "join"
    alone = isinstance(hosts, where.FixedHosts) and all(
        host == where.THIS_MACHINE for host, _ in hosts.hosts
    )
    return "local" if alone and wanted == "auto" else wanted
