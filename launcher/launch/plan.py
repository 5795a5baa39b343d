"""From the values of the options and the facts of this machine to a plan. Pure.

`launcher.run_job` collects the facts, calls `make_plan`, and carries the plan out or prints
`LaunchPlan.render()` for --dry-run. The values of `--env` are in the job's specification, and are
not rendered: they may be secrets.

The rules for the number of workers follow horovodrun (-np, --min-np, --max-np) and torchrun
(--nnodes, --nproc-per-node):

* -np N: the first round waits for N. Then the job continues with the workers that are left, down to
  --min-np (default 1). With --min-np M, M are enough when --start-timeout is over.
* Without -np: all slots of a fixed list, at most --max-np; with a discovery script --min-np.
* The most: --max-np, else N for a fixed list, else no limit.

A login over ssh has almost none of this shell's variables. Passing on all of them would be wrong:
some belong to this machine alone, some are secrets. So only variables that configure Python,
numerics and communication are passed on to other hosts, by name; `-x NAME` adds others.
"""

import fnmatch
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from elastic_driver import contract
from elastic_driver.contract import VISIBLE_DEVICES, ports_in_words
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.job import units
from elastic_driver.options import ACCELERATORS, TfRoles, is_secret, masked, without_password
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words import counted
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.tf_config import CHIEF, PS, WORKERS_ONLY
from launcher.backends.mpi_ranks import settings_of_mpirun
from launcher.backends.slurm_allocation import step_options, variables_beside_srun
from launcher.launch import host_source as where
from launcher.launch.host_source import Facts, MachineFacts
from launcher.options.given import CommandLine
from launcher.options.table import LaunchOptions, worker_variables
from rendezvous.client_connections import is_loopback

# ---- the workers' command and specification -----------------------------------------------


_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
HEARTBEAT_S = 0.4  # between two heartbeats of an agent
HEARTBEATS_PER_S = 1000  # of all agents together: what the driver takes with little of a core
NAMED_JOB_WAITS_S = 300.0  # a person or systemd starts the next driver well within this time
TF_PORTS = 128  # free ports that each agent finds: more than a host has slots

PASSED_ON = (
    *("PATH", "PWD", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_*", "TZ"),
    "PYTHON*",
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*"),  # threads and numerics
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "CUDA_*", "CUBLAS_*", "CUDNN_*"),
    *("TF_CPP_*", "TF_ENABLE_*", "TF_GPU_*", "TF_NUM_*", "TF_USE_*", "XLA_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*"),  # communication
)
# Variables of one machine only.
OF_THIS_MACHINE = (
    *(*contract.VISIBLE_DEVICES, "NCCL_HOSTID", "*_SOCKET_IFNAME"),
    *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT"),
)


def split_variables(command: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables in front of a command, which a shell would set, and the rest of it."""
    variables: dict[str, str] = {}
    for number, word in enumerate(command):
        if _ASSIGNMENT.match(word) is None:
            return variables, command[number:]
        name, _, value = word.partition("=")
        variables[name] = value
    return variables, ()


def worker_command(
    command: tuple[str, ...], python: str, *, script: bool = False
) -> tuple[str, ...]:
    """Return a worker's argv: `python` runs scripts and modules, other commands stay.

    `script`: the command is a script, whatever its name.
    """
    if not command:
        raise UsageError("no command to run; use elasticrun [OPTIONS] -- script.py [ARGS…]")
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError("-m needs the name of a module: elasticrun [OPTIONS] -m MODULE")
        return (python, *command)
    if not command[0]:
        raise UsageError("the command is an empty word; is a shell variable not set?")
    return (python, *command) if script or command[0].endswith(".py") else command


def job_spec(
    line: CommandLine,
    settings: Settings,
    facts: Facts,
    *,
    backend: str,
    hosts: int,
) -> tuple[JobSpec, tuple[str, ...], list[str]]:
    """Return the specification of the job, the variables that workers get from here, and remarks.

    `backend`: what starts the agents. `hosts`: how many are listed. The remarks are about variables
    of `--env` that are not set here.
    """
    shares = backend in ("local", "join")  # workers inherit the environment of a process like this
    options, environ = line.options, facts.environ
    given = {name: environ.get(name) if v is None else v for name, v in options.env}
    unset = [
        f"-x {n}: it is not set here, and is not passed on" for n, v in given.items() if v is None
    ]
    env = {name: value for name, value in given.items() if value is not None}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if options.network_interfaces else ():
        env.setdefault(name, ",".join(options.network_interfaces or ()))
    virtual = options.virtual_workers or settings.max_np
    if virtual is not None:
        env[contract.VIRTUAL_WORKERS] = str(virtual)
    if options.balance:
        env[contract.BALANCE] = "1"
    if settings.auto_scale or options.brain is not None:
        env[contract.MEASURE_GRADIENTS] = "1"
    own, command = split_variables(line.command)
    env = {**worker_variables(options, environ if shares else {}), **env, **own}
    passed_on = {} if shares else forwarded(environ)
    if backend == "slurm":
        passed_on |= variables_beside_srun(environ)
    elif backend == "mpi":  # mpirun passes them on to its ranks, and so do we
        passed_on |= settings_of_mpirun(environ)
    spec = line.fill(
        JobSpec,
        run_id=facts.run_id,
        command=worker_command(command, facts.python, script=options.run_path),
        cwd=facts.cwd,
        env={**passed_on, **env},
        max_restarts=settings.max_restarts or 0,
        driver_timeout=driver_timeout(options),
        heartbeat_interval=max(HEARTBEAT_S, hosts / HEARTBEATS_PER_S),
    )
    if settings.tf_roles is not None:
        # TensorFlow starts threads when imported, and a process with threads cannot be forked
        # safely: no warm processes unless an option asks for them.
        spec = replace(spec, warm=spec.warm or 0, slot_ports=TF_PORTS)
    return spec, tuple(name for name in passed_on if name not in env), unset


def driver_timeout(options: LaunchOptions) -> float:
    """Return the seconds for which agents and workers wait for the next driver; 0: not at all.

    Only a job that was given a name is likely to be resumed; others leave nothing behind.
    """
    if options.driver_timeout is not None:
        return options.driver_timeout
    return 0.0 if options.run_id is None else NAMED_JOB_WAITS_S


# ---- variables of this shell -------------------------------------------------------------


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers on other hosts get from here by default."""
    return {name: environ[name] for name in sorted(environ) if is_forwarded(name)}


def is_forwarded(name: str) -> bool:
    """Return whether a variable is passed on; never if its name looks like a secret's."""

    def matches(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return matches(PASSED_ON) and not (matches(OF_THIS_MACHINE) or is_secret(name))


# ---- TensorFlow --------------------------------------------------------------------------


def tf_roles(line: CommandLine) -> TfRoles | None:
    """Return the roles of the workers in TF_CONFIG; None: they get no TF_CONFIG."""
    asked: TfRoles | None = line["tf_roles"]
    return WORKERS_ONLY if asked is None and line.options.tf_config else asked


def check_tf_roles(settings: Settings) -> None:
    """Raise UsageError if the job may go on with fewer workers than its roles take."""
    if settings.tf_roles is None:
        return
    fixed = {role: count for role, count in settings.tf_roles if count}
    trains_alone = CHIEF in fixed and PS not in fixed
    need = sum(fixed.values()) + (not trains_alone)
    if settings.min_np < need:
        named = ", ".join(f"{count} {role}" for role, count in fixed.items())
        more = "" if trains_alone else " and a worker"
        raise UsageError(
            f"--tf-roles: {named}{more} are {need} processes, but the job may go on with "
            f"{settings.min_np}; say --min-np {need}"
        )


# ---- the plan -----------------------------------------------------------------------------


SSH_PORT = 22
NOTICE_SPREAD_S = 5.0  # a signal to a whole job reaches its processes within this time
START_TOGETHER_S = 5.0  # a first world of horovodrun has the slots of all hosts that answer
_BY_NAME = ("auto", "ssh", "mpi", "slurm", "local")  # backends whose hosts are machines with names


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything needed to start the job."""

    line: CommandLine
    settings: Settings
    spec: JobSpec
    driver: DriverOptions  # `bind_host` may still be a name
    hosts: where.HostSource
    backend: str
    agents: BackendJob  # for the backend, before the rendezvous is up
    state_dir: str
    gpus: bool  # the hosts have GPUs: a node check tests every slot, not every host
    forwarded: tuple[str, ...]  # the variables of this shell that workers on other hosts get
    notes: tuple[str, ...]
    fallback: "LaunchPlan | None" = None  # with hosts of its own, if the Brain is away

    @property
    def options(self) -> LaunchOptions:
        """The launcher's own options."""
        return self.line.options

    @property
    def verbosity(self) -> int:
        """-1 for --quiet, 1 for --verbose, else 0."""
        return self.options.verbose - self.options.quiet

    def render(
        self, agents: Sequence[tuple[str, str]] = (), binding: Sequence[tuple[int, str]] = ()
    ) -> str:
        """Return the plan for people, one thing a line; with --verbose the source of each option.

        `agents`: what would run on which host. `binding`: the processors of this machine's slots.
        """
        s = self.settings
        spec = self.spec
        driver = self.driver
        most = "any number" if s.max_np is None else str(s.max_np)
        free = ", any free port" + (
            "" if spec.ports is None else f" of {ports_in_words(spec.ports)}"
        )
        port = f":{driver.bind_port}" if driver.bind_port else free
        lines = [
            ("command", shlex.join(masked(spec.command))),
            ("in", spec.cwd),
            ("hosts", where.describe_hosts(self.hosts)),
            ("workers", f"start with {s.start_np}, go on with {s.min_np} or more, at most {most}"),
            ("backend", self.backend),
            ("rendezvous", f"{driver.bind_host}{port}"),
            ("events", f"{self.state_dir}/{spec.run_id}/events.jsonl"),
            ("logs", spec.log_dir or "terminal only"),
        ]
        if self.options.checks_nodes:
            slow = "excluded" if self.options.exclude_straggler else "named"
            lines.append(("check", f"faulty hosts are excluded, slow ones {slow}"))
        lines += [("agent", f"on {host}: {what}") for host, what in agents]
        if spec.bind != "none":
            lines.append(("binding", f"{spec.bind}, from the topology of each host"))
        lines += [("", f"slot {slot} here: CPUs {cpus}") for slot, cpus in binding]
        own = sorted(set(spec.env) - set(self.forwarded))
        for label, names in (("variables", own), ("passed on", self.forwarded)):
            if names:
                lines.append((label, " ".join(names)))
        lines += [("note", note) for note in self.notes]
        origins = self.line.origins() if self.options.verbose else ()
        lines += [
            ("set", f"{name} {without_password(value)}  ({who})") for name, value, who in origins
        ]
        return "\n".join(f"{label:<11} {text}" for label, text in lines)


def make_plan(line: CommandLine, facts: Facts) -> LaunchPlan:
    """Return the plan for a command line.

    Raises:
        UsageError: options contradict each other, or there is no command (exit 64).
        ClusterError: the hosts listed can never be enough (exit 75).
    """
    options = line.options
    role = facts.role
    machine = facts.machine
    if options.quiet and options.verbose:
        raise UsageError("-q and -v contradict each other; keep one of them")
    where.check_brain_options(line)
    alone = role or options.brain  # it starts no agents in an allocation
    allocation = None
    if not alone:
        allocation = where.choose_allocation(line, facts.environ, facts.allocation_text)
    if allocation is not None:  # this machine may be a login node
        machine = MachineFacts(max(allocation.counts("cpu")), max(allocation.counts("gpu")))
    slots = fewest = slots_of_a_host(options, machine)
    if allocation is not None and isinstance(options.nproc_per_node, str):
        fewest = min(filter(None, allocation.counts(options.nproc_per_node)))
    wish = _read_wish(line, fewest, slots)
    all_gpus = ""
    if slots is None and not any(wish) and _is_alone(line, facts) and allocation is None:
        slots = machine.gpus or 1
        all_gpus = "" if options.quiet else _describe_default(slots, machine)
    wanted = (wish.least or wish.asked, wish.most or wish.asked)
    hosts = where.choose_hosts(line, facts, slots, wanted, allocation)
    if role and slots is None and not role.own and line.level("nnodes"):
        wish = wish._replace(most=None)  # each node brings its own number of workers
    settings, size_note = _settings(line, wish, hosts)
    settings = replace(settings, expects=_expects(line, settings))
    backend = "slurm" if allocation is not None else _backend(options, hosts)
    listed = len(hosts.hosts or ())
    spec, passed_on, unset = job_spec(line, settings, facts, backend=backend, hosts=listed)
    of_slurm = isinstance(hosts, where.FixedHosts) and hosts.allocation is not None
    if allocation is not None and of_slurm and slots is None and allocation.gpus_of_a_worker > 1:
        gpus = allocation.gpus_of_a_worker
        spec = replace(spec, virtual_local_rank=True, devices_of_a_worker=gpus)
    agents = line.fill(
        BackendJob,
        cwd=facts.cwd,
        environ=facts.environ,
        hosts=hosts.hosts or (),
        grows=hosts.hosts is None,
        resumable=spec.driver_timeout > 0,
        allocation=None if allocation is None else allocation.job_id,
        step_options={} if allocation is None else step_options(allocation.shares),
    )
    driver = _driver_options(line, role)
    notes = [*line.warnings, all_gpus, size_note, *unset, _who_may_join(options, role)]
    notes.append(_outside(driver))
    if allocation is not None and of_slurm:
        notes += allocation.remarks(hosts.hosts or ())
    return LaunchPlan(
        line=line,
        settings=settings,
        spec=spec,
        driver=driver,
        hosts=hosts,
        backend=backend,
        agents=agents,
        state_dir=facts.state_dir,
        gpus=machine.gpus > 0,
        forwarded=passed_on,
        notes=tuple(filter(None, notes)),
        fallback=make_plan(where.without_brain(line), facts) if options.brain_fallback else None,
    )


def _driver_options(line: CommandLine, role: where.Serve | None) -> DriverOptions:
    """Return the options of the driver, with the address at which it listens."""
    host, port = (role.host, role.port) if role else line.options.rdzv_endpoint
    named = "" if host in where.ANYWHERE or is_loopback(host) else host
    driver = line.fill(
        DriverOptions, bind_host=host, bind_port=port, given_host=named, ports=line["ports"]
    )
    if role:  # nodes that join are reported at once: a question for hosts waits for news
        driver = replace(driver, discovery_interval=0.0)
    return driver


def _outside(driver: DriverOptions) -> str:
    """Return a remark if the rendezvous has a port outside of --ports."""
    port, ports = driver.bind_port, driver.ports
    if ports is None or not port or ports[0] <= port <= ports[1]:
        return ""
    return f"port {port} of the rendezvous is not in {ports_in_words(ports)}: open it, too"


def _is_alone(line: CommandLine, facts: Facts) -> bool:
    """Return whether the job runs on this machine because nothing names other hosts."""
    named = where.choose_host_option(line)
    if line.options.brain is not None:
        return False
    return facts.role is None and facts.ranks is None and named in (None, "standalone")


def _describe_default(workers: int, machine: MachineFacts) -> str:
    if not machine.gpus:
        return "1 worker, because this machine has no GPU; -np N starts N"
    plural = "s, one for each GPU" if workers > 1 else ", for the GPU"
    return f"{workers} worker{plural} of this machine; -np N starts N"


def _who_may_join(options: LaunchOptions, role: where.Serve | None) -> str:
    if role is None or options.token_file is not None:
        return ""
    if options.run_id is not None:
        return (
            f"the run id {options.run_id} is no secret: anyone who knows it and reaches port "
            f"{role.port} can join this job; give the same --token-file FILE on every node, made "
            "with: (umask 077; openssl rand -hex 32 > FILE)"
        )
    return (
        "nodes can join only with this run's token, from a shared --state-dir; give the same "
        "--run-id (--rdzv-id) or --token-file on every node otherwise"
    )


def _backend(options: LaunchOptions, hosts: where.HostSource) -> str:
    wanted = options.backend
    if isinstance(hosts, where.JoinedHosts):
        if wanted != "auto":
            raise UsageError(f"--backend {wanted} starts agents, but nodes that join start theirs")
        return "join"
    here = isinstance(hosts, where.FixedHosts) and {h for h, _ in hosts.hosts} == {"localhost"}
    return "local" if here and wanted == "auto" else wanted


# ---- the number of workers ---------------------------------------------------------------


class _Wish(NamedTuple):
    """The sizes that options name: -np, --min-np, --max-np, or the same from --nnodes."""

    asked: int | None
    least: int | None
    most: int | None


def slots_of_a_host(options: LaunchOptions, machine: MachineFacts) -> int | None:
    """Return the slots of a host that is listed without a number; None if no option sets them.

    Raises UsageError for `--nproc-per-node gpu` if there is no GPU.
    """
    workers, slots = options.nproc_per_node, options.slots_per_host
    if workers is None:
        return slots
    if slots not in (None, workers):
        raise UsageError("--slots-per-host and --nproc-per-node say the same; keep one of them")
    if workers in ACCELERATORS and not machine.gpus:
        raise UsageError(
            f"--nproc-per-node {workers}: this machine has no GPU that is visible; say cpu, auto "
            f"or a number, or check {' and '.join(VISIBLE_DEVICES[:2])}"
        )
    if isinstance(workers, int):
        return workers
    return machine.cpus if workers == "cpu" else machine.gpus or machine.cpus


def _read_wish(line: CommandLine, fewest: int | None, slots: int | None) -> _Wish:
    """Return the sizes; the nodes of --nnodes have `fewest` to `slots` workers."""
    options = line.options
    if nodes := _nodes(line):
        return _Wish(None, nodes[0] * (fewest or 1), nodes[1] * (slots or 1))
    sizes = {"--min-np": options.min_np, "--num-proc": options.num_proc, "--max-np": options.max_np}
    known = [(name, number) for name, number in sizes.items() if number is not None]
    for (low_name, low), (high_name, high) in pairwise(known):
        if low > high:
            raise UsageError(f"{low_name} {low} is more than {high_name} {high}")
    return _Wish(options.num_proc, options.min_np, options.max_np)


def _nodes(line: CommandLine) -> tuple[int, int] | None:
    """Return --nnodes, if it sets the size; raises UsageError if another option does so too."""
    nodes = line.options.nnodes
    level = line.level("nnodes")
    other = max(("num_proc", "min_np", "max_np"), key=line.level)
    if nodes is not None and level == line.level(other):
        raise UsageError(
            f"--nnodes and --{other.replace('_', '-')} both set the size of the job; "
            "use -np, --min-np, --max-np or --nnodes with --nproc-per-node"
        )
    return nodes if level > line.level(other) else None


def _settings(line: CommandLine, wish: _Wish, hosts: where.HostSource) -> tuple[Settings, str]:
    """Return the settings of the core, and a remark on the number of workers (may be empty)."""
    described = where.describe_hosts(hosts)
    auto_scale = line["auto_scale"]
    # horovodrun uses all slots of the hosts listed once a job may change its size.
    grows = auto_scale or (line["horovod"] and wish.least is not None)
    start, most, note = _start_and_most(wish, hosts, described, auto_scale=auto_scale, grows=grows)
    nodes = _nodes(line)
    unit = line["node_unit"]
    if nodes is not None and -(-nodes[0] // unit) * unit > nodes[1]:
        raise UsageError(
            f"--node-unit {unit}: no multiple of it lies between {nodes[0]} and {nodes[1]} hosts "
            "(--nnodes); change one of them"
        )
    settings = line.fill(
        Settings,
        start_np=start,
        min_np=wish.least or 1,
        max_np=most,
        start_min_np=wish.least,
        min_hosts=nodes[0] if nodes else 1,
        max_hosts=nodes[1] if nodes else None,
        fixed_hosts=isinstance(hosts, where.FixedHosts),
        one_host_per_machine=_named_by_users(line, hosts),
        tf_roles=tf_roles(line),
        notice_spread=NOTICE_SPREAD_S,
        start_together=START_TOGETHER_S if line["horovod"] else 0.0,
        # Horovod's states have no checkpoints: its scripts read files of their own.
        own_values=line["horovod"],
        restart_from_scratch=line["restart_from_scratch"] or line["horovod"],
        failed_hosts=line["failed_hosts"] or ("leave" if line["horovod"] else "keep"),
    )
    needed = units.width(settings)
    there = sum(1 for _, slots in hosts.hosts or () if slots)
    if settings.fixed_hosts and there < needed:
        raise ClusterError(
            f"need {counted(needed, 'host')} (--nnodes, --node-unit), found {there} ({described}); "
            "name more of them, or let nodes join with --rdzv-endpoint or --serve "
            "(docs/joining.md)"
        )
    check_tf_roles(settings)
    if not note and any(slots == SSH_PORT for _, slots in hosts.hosts or ()):
        note = f"host:{SSH_PORT} gives a host {SSH_PORT} slots; the port of sshd goes into -p"
    return settings, note


def _named_by_users(line: CommandLine, hosts: where.HostSource) -> bool:
    """Return whether two of the hosts' names may mean one machine by mistake.

    Slurm, the Brain and nodes that join name each host once. What a host is to a backend of a
    package, such as a container, only that backend knows.
    """
    if line["separate_names"] or line["backend"] not in _BY_NAME:
        return False
    if isinstance(hosts, where.FixedHosts):
        return hosts.allocation is None
    return isinstance(hosts, where.DiscoveredHosts)


def _expects(line: CommandLine, settings: Settings) -> str:
    """Return why the job waits for so many, and how to say otherwise; "" where nothing says so."""
    level, timeout = line.level, f"--start-timeout ({settings.start_timeout:g} s)"
    if _nodes(line):
        given = line.settings["nnodes"]
        if given.source == "WORLD_SIZE":
            return (
                f"WORLD_SIZE={given.text}, MASTER_ADDR and RANK in the environment ask for "
                f"{given.text} nodes; unset them, or say --standalone, to train here alone"
            )
        fewer = (
            "" if settings.min_hosts < (settings.max_hosts or 0) else " --nnodes 1:N takes fewer"
        )
        return (
            f"--nnodes {given.text} ({given.source}) asks for them: start the same command on the "
            f"other nodes;{fewer}".rstrip(";")
        )
    asked = next((n for n in ("num_proc", "min_np") if level(n)), None)
    if asked is not None:
        flag = "-np" if asked == "num_proc" else "--min-np"
        given = line.settings[asked]
        hint = "lower it" if asked == "min_np" else f"--min-np N begins with fewer after {timeout}"
        return f"{flag} {given.text} ({given.source}) asks for them; {hint}"
    return f"every slot of the hosts is waited for; --min-np N begins with fewer after {timeout}"


def _start_and_most(
    wish: _Wish, hosts: where.HostSource, described: str, *, auto_scale: bool, grows: bool
) -> tuple[int, int | None, str]:
    """Return the workers to start with, the most workers, and a remark (may be empty).

    With `auto_scale` the number asked for is only where the search begins. `grows`: a job without
    a maximum grows beyond that number.
    """
    least = wish.least or 1
    if auto_scale:
        wish = wish._replace(asked=wish.asked or least)
    if hosts.hosts is None:
        return wish.asked or least, wish.most, ""
    capacity = sum(slots for _, slots in hosts.hosts)
    most = wish.most or (None if grows else wish.asked)
    start = wish.asked or max(min(capacity, wish.most or capacity), least)
    if capacity < (wish.least or start):
        slots = counted(wish.least or start, "slot")
        raise ClusterError(
            f"need {slots}, found {capacity} ({described}); name more "
            "hosts or slots with -H, --hostfile or --slots-per-host, or lower -np or --min-np"
        )
    if start <= capacity:
        return start, most, ""
    workers = counted(capacity, "worker")
    remark = f"starting with {workers} instead of {start}: {described} has no more slots"
    return capacity, most, remark
