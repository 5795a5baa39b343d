"""The options of `elasticrun`, and those of other launchers.

`LaunchOptions` has the options that the launcher itself reads. An option that the driver, a backend
or a worker reads is a field of the struct that this part receives (`STRUCTS`). The command line,
the environment (`ELASTICRUN_MIN_NP`) and configuration files (`min-np: 2`) are read with `OPTIONS`,
and `--help` is printed from it.

The options of horovodrun 0.28.1 that have an effect are among them. Its other spellings (opposites,
what is ignored, variables, YAML) follow at the end, with the names and meanings of its parser and
of its configuration file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from elastic_driver import options as o
from elastic_driver.brain.store.address import Address, read_address
from elastic_driver.options import FLAG, SECONDS, Heading, ValueKind, number, option, text, whole
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec

BRAIN = Heading.BRAIN
HOSTS = Heading.HOSTS
JOIN = Heading.JOIN
SIZE = Heading.SIZE
START = Heading.START
CHECK = Heading.CHECK
HOROVOD = Heading.HOROVOD
OTHER = Heading.OTHER
JOURNAL = o.matching(
    "sqlite|etcd://h1:2379,h2:2379", r"sqlite|etcd://.+", "is sqlite or etcd://HOST:PORT,…", str
)

STATS_DB = ValueKind(read_address, "URL")
BRAIN_URL = o.matching(
    "URL", r"https?://[^/@\s]+:[0-9]{1,5}/?", "needs http(s)://HOST:PORT", lambda w: w.rstrip("/")
)
WEIGHT = o.matching(
    "W", r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,6})?", "needs a number above 0, below a million", float
)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options that the launcher itself reads."""

    host_discovery_script: str | None = option(HOSTS, text("FILE"), None,
        "A program that prints the present hosts, one 'host' or 'host:slots' a line. It is run "
        "again and again; hosts join and leave the job when they appear and disappear.")
    host_discovery: str | None = option(HOSTS, text("NAME[:ARG]"), None,
        "A source of hosts from another package, with its argument (docs/hosts.md). script:FILE "
        "and hostfile:FILE are --host-discovery-script FILE and --hostfile FILE.")
    discovery_timeout: float = option(HOSTS, SECONDS, 30.0,
        "A discovery script that runs longer is killed; the last known hosts stay.")
    hosts: str | None = option(HOSTS, text("h1:2,h2:2"), None,
        "Fixed hosts with their slots; n[01-04]:2 means four of them.", aliases=("-H", "--host"))
    hostfile: str | None = option(HOSTS, text("FILE"), None,
        "Hosts from a file, 'host', 'host:4' or 'host slots=4' a line; read again when it changes.",
        aliases=("--host-file", "--machinefile", "-hostfile"))
    standalone: bool = option(HOSTS, FLAG, False,
        "Run on this machine only, even if a file or a variable names hosts.")
    slots_per_host: int | None = option(HOSTS, whole(least=1), None,
        "Slots of a host that is listed without a number.", aliases=("--slots",), shown="1")
    separate_names: bool = option(HOSTS, FLAG, False,
        "Make each name a host of its own, even if two of them are one machine. By default such a "
        "machine is one host, which has the slots of both, as with mpirun.")

    brain: str | None = option(BRAIN, BRAIN_URL, None,
        "Train on the hosts that the Brain at this address (elasticbrain serve) grants the job, "
        "and follow its plans; it shares its hosts among all of its jobs.")
    brain_token_file: str | None = option(BRAIN, text("FILE"), None,
        "The file with the token of all jobs, or of this one, that the Brain has written. Only you "
        "may read it.", shown="job.token in the Brain's default folder, on its machine")
    brain_fallback: bool = option(BRAIN, FLAG, False,
        "If the Brain is away for --start-timeout when the job starts, train on the hosts of the "
        "other options, with --auto-scale.")
    weight: float = option(BRAIN, WEIGHT, 1.0,
        "The share of the Brain's slots: a job of weight 2 gets about twice those of weight 1.")

    serve: bool = option(JOIN, FLAG, False,
        "Run the job's driver here, but no workers: train on the nodes that --join the job.")
    join: tuple[str, int] | None = option(JOIN, o.ENDPOINT, None,
        "Make this node a host of the job at HOST:PORT, with --nproc-per-node workers. It may "
        "start before the server, and come back after it has left (Ctrl-C, SIGTERM).")
    rdzv_endpoint: tuple[str, int] = option(JOIN, o.ENDPOINT, ("127.0.0.1", 0),
        "Address and port of the job's rendezvous; 0.0.0.0 for all addresses. With --nnodes above "
        "1 and no list of hosts, start the same command on every node: HOST serves, and all train.",
        shown="this machine only, or the address that remote hosts reach; any free port")
    rdzv_backend: str | None = option(JOIN, text("NAME"), None,
        "Accepted because torchrun has it; the job always has its own rendezvous.")
    local_addr: str | None = option(JOIN, text("ADDRESS"), None,
        "For a node that joins: the address at which workers of other nodes reach its workers.",
        shown="that of --network-interfaces, else of the interface that leads to the server")
    node_rank: int | None = option(JOIN, whole(), None,
        "Node 0 serves, the others join it. Workers get ranks in the order in which nodes join.",
        shown="NODE_RANK or RANK in the environment, if MASTER_ADDR is used")
    master_addr: str | None = option(JOIN, text("HOST"), None,
        "The address of node 0, for nodes that are started with --node-rank.",
        shown="MASTER_ADDR in the environment, else 127.0.0.1")
    master_port: int | None = option(JOIN, whole("PORT", least=1), None,
        "The port of node 0.", shown="MASTER_PORT in the environment, else 29500")
    token_file: str | None = option(JOIN, text("FILE"), None,
        "A file with the secret that lets nodes join, the same on all nodes. Only you may read it.",
        shown="the run's own token in a shared --state-dir, else derived from --run-id")

    num_proc: int | None = option(SIZE, whole(least=1), None,
        "Workers to start with. Later the job continues with the workers that are left.",
        aliases=("-np", "-n"),
        shown="every slot of fixed hosts, else --min-np; if no option sets hosts or size, one for "
        "each GPU of this machine")
    min_np: int | None = option(SIZE, whole(least=1), None,
        "Never train with fewer workers. After --start-timeout the job starts with this many.",
        aliases=("--min-num-proc",), shown="1, and the start waits for -np")
    max_np: int | None = option(SIZE, whole(least=1), None,
        "Never train with more workers.", aliases=("--max-num-proc",),
        shown="-np for fixed hosts, no limit with a discovery script")
    nnodes: tuple[int, int] | None = option(SIZE, o.NODE_RANGE, None,
        "The size in hosts (as in torchrun): MIN to MAX hosts of --nproc-per-node workers each.")
    nproc_per_node: int | str | None = option(SIZE, o.NODE_WORKERS, None,
        "Workers on each host: a number, or this machine's accelerators (gpu, xpu, npu), cores "
        "(cpu), or accelerators if it has any and cores otherwise (auto).", shown="1")
    virtual_workers: int | None = option(SIZE, whole(least=1), None,
        "For elastic.FixedBatch: with any number of workers, a step trains the batch of N.",
        shown="--max-np")
    balance: bool = option(SIZE, FLAG, False,
        "For elastic.FixedBatch: give slow workers less of each step; the result stays the same.")

    backend: str = option(START, text("auto|local|ssh|slurm|mpi|NAME"), "auto",
        "How agents get onto hosts. auto: local for names of this machine, ssh for all others, and "
        "slurm inside an allocation without named hosts. NAME: your own (docs/starters.md).")
    network_interfaces: tuple[str, ...] | None = option(START, o.names("eth0,eth1"), None,
        "Interfaces for the workers (sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME) and for the "
        "rendezvous. May be repeated. Default: the interface that leads to the other hosts.",
        aliases=("--network-interface", "--nics"))
    env: tuple[tuple[str, str | None], ...] = option(START, o.VARIABLES, (),
        "A variable for the workers; NAME alone passes on its value here. May be repeated. Workers "
        "on other hosts get some variables by default (docs/hosts.md).", aliases=("-x",))
    run_path: bool = option(START, FLAG, False,
        "COMMAND is a Python script, even if its name does not end in .py.")
    tf_config: bool = option(Heading.TENSORFLOW, FLAG, False,
        "Give each worker TF_CONFIG, for tf.distribute. When workers come or go, all are started "
        "again with a new one; BackupAndRestore continues from the last checkpoint.")

    tf_orchestrator: bool = option(Heading.TENSORFLOW, FLAG, False,
        "Run no job: let TensorFlow nodes that others start form clusters over HTTP, until Ctrl-C. "
        "Listens at --rdzv-endpoint (docs/tensorflow.md).")

    network_check: bool = option(CHECK, FLAG, False,
        "Run short tasks on all hosts in pairs before the job starts; start without faulty hosts, "
        "and name slow ones.")
    comm_perf_test: bool = option(CHECK, FLAG, False,
        "Run --network-check, and show bandwidth and latency of the network.")
    straggler_detection: bool = option(CHECK, FLAG, False,
        "Run --network-check, and also train a small transformer to find slow hosts.")
    exclude_straggler: bool = option(CHECK, FLAG, False,
        "Run --straggler-detection, and start without the slow hosts.")
    check_timeout: float = option(CHECK, SECONDS, 120.0,
        "A task that takes longer has failed; also the time for agents to start for the check.")

    timeline_filename: str | None = option(HOROVOD, text("FILE"), None,
        "Write a timeline of Horovod's operations to this file, as Chrome's tracing reads it.")
    timeline_mark_cycles: bool | None = option(HOROVOD, FLAG, None,
        "Mark in the timeline when operations were agreed on; --no-timeline-mark-cycles: do not.")
    no_stall_check: bool | None = option(HOROVOD, FLAG, None,
        "Do not name tensors that some ranks never submit; --stall-check: do.")
    stall_check_warning_time_seconds: float | None = option(HOROVOD, o.SECONDS_OR_0, None,
        "Name a tensor that some ranks have not submitted after so many seconds.", shown="60")
    stall_check_shutdown_time_seconds: float | None = option(HOROVOD, o.SECONDS_OR_0, None,
        "Fail such a tensor after so many seconds; 0: never.", shown="0")
    fusion_threshold_mb: float | None = option(HOROVOD, number("MB"), None,
        "Send small tensors together, up to so many megabytes; 0: each by itself.", shown="25")
    gloo_timeout_seconds: float | None = option(HOROVOD, o.SECONDS_OR_0, None,
        "The longest that an exchange between ranks may take; 0: as if it were not given.")
    log_level: str | None = option(HOROVOD, o.LOG_LEVEL, None,
        "Show messages of Horovod's operations from this level on.", shown="WARNING")
    log_with_timestamp: bool | None = option(HOROVOD, FLAG, None,
        "Begin them with the time; --log-without-timestamp, --log-hide-timestamp: do not.",
        aliases=("--no-log-hide-timestamp",))
    dynamic_process_sets: bool | None = option(HOROVOD, FLAG, None,
        "Let scripts add and remove process sets after hvd.init().")

    run_id: str | None = option(Heading.STATE, text("ID"), None,
        "The job's name, in logs and in the state directory. A job with a name can go on after its "
        "driver has died: give the same command again, or --resume.",
        aliases=("--rdzv-id",), shown="time and a random suffix")
    state_dir: str | None = option(Heading.STATE, text("DIR"), None,
        "The folder of all jobs; that of this one is DIR/ID, with event log and journal.",
        shown="~/.local/state/elastic-driver")
    resume: bool = option(Heading.STATE, FLAG, False,
        "Go on with the job --run-id, whose driver has died. COMMAND and options are those of its "
        "start and are not given again. With a COMMAND: go on with the job if it has begun, begin "
        "it otherwise (for systemd). If the job is over, show its result and exit with its status.")
    journal: str = option(Heading.STATE, JOURNAL, "sqlite",
        "Where the journal of the job is kept: in the folder of the job, or also in the etcd of "
        "these members, so that --standby on another host can go on with the job.")
    standby: bool = option(Heading.STATE, FLAG, False,
        "Wait beside the driver of the job --run-id with the same --journal etcd://…, and go on "
        "with the job when its host is lost (docs/standby.md). Ends with the job's exit status.")
    driver_lease: int = option(Heading.STATE, whole(least=2), 5,
        "Seconds without a sign of the driver in etcd until a standby has taken over, at most.")
    driver_timeout: float | None = option(Heading.STATE, o.SECONDS_OR_AUTO, None,
        "Agents and workers train on without a driver and wait this long for the next one. Then "
        "they leave at a step boundary, write a checkpoint, and exit. 0: end with the driver.",
        shown="auto: 300 with --run-id, else 0")
    stats_db: Address | None = option(Heading.STATE, STATS_DB, None,
        "Keep statistics of the job in this database: postgresql://USER@HOST/DATABASE or "
        "sqlite:///FILE (docs/statistics.md).", shown="statistics.db in the folder of the job")

    config_file: str | None = option(OTHER, text("FILE.yaml"), None,
        "Options from a YAML file, 'min-np: 2' a line. Flags win over ELASTICRUN_<OPTION> "
        "variables, these over the file, the file over defaults.")
    log_format: str = option(OTHER, o.choice("text", "json"), "text",
        "Form of elasticrun's own lines on stderr.")
    no_progress: bool = option(OTHER, FLAG, False,
        "Keep no status line at the bottom of the terminal (docs/operations.md).")
    verbose: bool = option(OTHER, FLAG, False,
        "Show more; with --dry-run: where each value came from.", aliases=("-v",))
    quiet: bool = option(OTHER, FLAG, False, "Show only failures.", aliases=("-q",))
    dry_run: bool = option(OTHER, FLAG, False, "Check everything, show the plan, start nothing.")
    check_build: bool = option(OTHER, FLAG, False, "Show what this installation can do.",
        aliases=("-cb",))
    version: bool = option(OTHER, FLAG, False, "Show the version.")
    help: bool = option(OTHER, FLAG, False, "Show this text.", aliases=("-h",))
# fmt: on

    @property
    def trains_for_check(self) -> bool:
        """True if the node check also trains a transformer."""
        return self.straggler_detection or self.exclude_straggler

    @property
    def in_etcd(self) -> bool:
        """True if the journal is kept in etcd."""
        return self.journal != "sqlite"

    @property
    def checks_nodes(self) -> bool:
        """True if one of the four flags asks for a node check."""
        return self.network_check or self.comm_perf_test or self.trains_for_check


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: each record is unique
class Option:
    """One option; the attributes are the arguments of `elastic_driver.options.option`."""

    field: str
    default: Any
    heading: Heading
    kind: ValueKind[Any]
    help: str
    aliases: tuple[str, ...]
    shown: str
    flag: str

    @property
    def name(self) -> str:
        """The name without dashes; also the key in a configuration file."""
        return self.flag or self.field.replace("_", "-")

    @property
    def long(self) -> str:
        """The name as typed: `--min-np`."""
        return f"--{self.name}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings, short ones first; of a switch also that of its opposite."""
        opposites = (word for word, switch in OPPOSITES.items() if switch == self.long)
        known = (self.long, *self.aliases, *opposites)
        return tuple(sorted(known, key=lambda word: word.startswith("--")))

    @property
    def variable(self) -> str:
        """The environment variable that sets it: `ELASTICRUN_MIN_NP`."""
        return "ELASTICRUN_" + self.name.upper().replace("-", "_")

    @property
    def default_text(self) -> str:
        """The default in words; empty if the option is unset or off by default."""
        if self.shown or self.default in (None, ()) or self.default is False:
            return self.shown
        if not isinstance(self.default, tuple):
            return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in self.default)


STRUCTS: tuple[type[Any], ...] = (LaunchOptions, Settings, DriverOptions, BackendJob, JobSpec)
OPTIONS = tuple(
    Option(field.name, field.default, **field.metadata)
    for heading in Heading
    for struct in STRUCTS
    for field in fields(struct)
    if field.metadata.get("heading") is heading
)

# A switch → the one whose opposite it is; those of horovodrun are in `launcher.options.table`.
OPPOSITES = {"--no-verify-state": "--verify-state"}

# Options of torchrun, horovodrun and mpirun that do not exist here → the advice to the user.
FOREIGN: dict[str, str] = {
    "--jsrun": "it starts processes by MPI, and training here uses none; use --backend mpi or ssh",
    "--blacklist": "use --host-failures and --blacklist-cooldown-range",
    "--wdir": "change folder first: cd DIR && elasticrun ...",
    "-wdir": "change folder first: cd DIR && elasticrun ...",
}

# Options of other launchers that are ignored with a remark → (number of values, reason).
NEEDLESS: dict[str, tuple[int, str]] = {
    "--monitor-interval": (1, "a worker's end is noticed at once"),
    "--no-python": (0, "a COMMAND that does not end in .py runs as it is"),
    "--start-method": (1, "workers are separate programs"),
    "--role": (1, "all workers have the same role"),
    "--event-log-handler": (1, "events are lines of STATE_DIR/RUN_ID/events.jsonl"),
    "--logs-specs": (1, "use --log-dir, --tee and --redirects"),
    "--duplicate-stdout-filters": (1, "use --log-dir, and search its files"),
    "--duplicate-stderr-filters": (1, "use --log-dir, and search its files"),
    "--signals-to-handle": (1, "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are always handled"),
    "-u": (0, "the output of workers is never buffered"),
    "--tag-output": (0, "every line begins with its worker's rank"),
    "-tag-output": (0, "every line begins with its worker's rank"),
    "--oversubscribe": (0, "a host has the slots that you give it"),
    "--allow-run-as-root": (0, "root may start a job"),
    "--map-by": (1, "workers fill the hosts in their order"),
}

# Keys of torchrun's --rdzv-conf → the option that means the same.
RDZV_CONF = {
    "timeout": "--start-timeout",
    "join_timeout": "--start-timeout",
    "last_call_timeout": "--last-call",
}

# torchrun also reads these from variables PET_<NAME>. A program that starts us may set them, as
# Kubeflow's PyTorchJob does for elastic jobs.
PET_OPTIONS = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--standalone", "--max-restarts"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter", "--local-addr"),
    *("--run-path", "--shutdown-timeout", "--virtual-local-rank"),
)


# ---- other spellings of horovodrun --------------------------------------------------------


# A switch → the one whose opposite it is.
HOROVOD_OPPOSITES = {
    "--stall-check": "--no-stall-check",
    "--no-timeline-mark-cycles": "--timeline-mark-cycles",
    "--log-without-timestamp": "--log-with-timestamp",
    "--log-hide-timestamp": "--log-with-timestamp",
}

_ALL_OPPOSITES = {**OPPOSITES, **HOROVOD_OPPOSITES}

# Another spelling → the option and its value.
_MEANS = {"--mpi": ("--backend", "mpi"), "--use-mpi": ("--backend", "mpi")}

# Taken so that commands written for horovodrun run as they are; nothing here needs them.
_WITHOUT_EFFECT: dict[str, ValueKind[Any]] = {
    "--gloo": FLAG,
    "--use-gloo": FLAG,
    "--disable-cache": FLAG,
    "--cycle-time-ms": number("MS"),
    "--cache-capacity": whole(),
    "--hierarchical-allreduce": FLAG,
    "--no-hierarchical-allreduce": FLAG,
    "--hierarchical-allgather": FLAG,
    "--no-hierarchical-allgather": FLAG,
    "--torus-allreduce": FLAG,
    "--no-torus-allreduce": FLAG,
    "--autotune": FLAG,
    "--no-autotune": FLAG,
    "--autotune-log-file": text("FILE"),
    "--autotune-warmup-samples": whole(),
    "--autotune-steps-per-sample": whole(),
    "--autotune-bayes-opt-max-samples": whole(),
    "--autotune-gaussian-process-noise": number("0-1", most=1.0),
    "--mpi-threads-disable": FLAG,
    "--no-mpi-threads-disable": FLAG,
    "--tcp": FLAG,
    "--binding-args": text("WORDS"),
    "--num-nccl-streams": whole(),
    "--thread-affinity": whole(),
}
IGNORED = tuple(
    Option(name[2:].replace("-", "_"), None, Heading.HOROVOD, kind, "Ignored.", (), "", name[2:])
    for name, kind in _WITHOUT_EFFECT.items()
)

# A section of horovodrun's configuration file → what its keys lack to be names of options.
SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi"}

# A variable → the option that it sets; flags and variables of ours win over it.
VARIABLES = {
    "HOROVOD_TIMELINE": "--timeline-filename",
    "HOROVOD_TIMELINE_MARK_CYCLES": "--timeline-mark-cycles",
    "HOROVOD_STALL_CHECK_DISABLE": "--no-stall-check",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "--stall-check-warning-time-seconds",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "--stall-check-shutdown-time-seconds",
    "HOROVOD_FUSION_THRESHOLD": "--fusion-threshold-mb",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "--gloo-timeout-seconds",
    "HOROVOD_LOG_LEVEL": "--log-level",
    "HOROVOD_LOG_HIDE_TIME": "--log-hide-timestamp",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "--dynamic-process-sets",
    "HOROVOD_START_TIMEOUT": "--start-timeout",
    "HOROVOD_ELASTIC_TIMEOUT": "--elastic-timeout",
}
_IN_BYTES = "HOROVOD_FUSION_THRESHOLD"
_MB = 2**20


class Spelled(NamedTuple):
    """The spelling of an option of the table, and the value that came with it."""

    spelling: str
    value: str | None  # None: it stands in the next word, or none is needed


def translated(spelling: str, value: str | None) -> Spelled:
    """Return the option that another spelling means, such as one of horovodrun."""
    if spelling in _ALL_OPPOSITES:
        return Spelled(_ALL_OPPOSITES[spelling], _opposite(value or "true"))
    if spelling in _MEANS and (value is None or _is_on(value)):
        return Spelled(*_MEANS[spelling])
    return Spelled(spelling, value)


def from_variable(name: str, value: str) -> Spelled:
    """Return the option that one of `VARIABLES` sets."""
    if name == _IN_BYTES and value.isascii() and value.isdigit():
        value = repr(int(value) / _MB)
    return translated(VARIABLES[name], value)


def from_section(section: str, key: str, value: str) -> Spelled | None:
    """Return the option of one entry of horovodrun's YAML; None where it changes nothing."""
    if (section, key) == ("autotune", "enabled"):
        return Spelled("--autotune", value) if _is_on(value) else None
    if (section, key) == ("stall-check", "enabled"):
        return translated("--stall-check", value)
    return translated(f"--{SECTIONS[section]}{key}", value)


def from_controller(name: str) -> Spelled:
    """Return the option that `controller:` means; raises ValueError for an unknown one."""
    spelling = _CONTROLLERS.get(name.lower())
    if spelling is None:
        raise ValueError(f"is one of {', '.join(_CONTROLLERS)}, got {name!r}")
    return translated(spelling, None)


def remark(ignored: tuple[str, ...]) -> str:
    """Return one line that names all options that were given in vain; empty if none was."""
    are = "is" if len(ignored) == 1 else "are"
    why = "nothing here needs it" if len(ignored) == 1 else "nothing here needs them"
    named = ", ".join(ignored)
    return f"{named} {are} ignored: {why} (docs/from-horovod.md)" if ignored else ""


def worker_variables(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which workers learn the options of `VARIABLES` that were set.

    A worker on another host gets all of them; one that shares this environment has those of
    `environ` anyway, and those that an option sets differently win.
    """
    found: dict[str, object] = {
        "HOROVOD_TIMELINE": options.timeline_filename,
        "HOROVOD_TIMELINE_MARK_CYCLES": _digit(options.timeline_mark_cycles),
        "HOROVOD_STALL_CHECK_DISABLE": _digit(options.no_stall_check),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": _short(options.stall_check_warning_time_seconds),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _short(options.stall_check_shutdown_time_seconds),
        "HOROVOD_FUSION_THRESHOLD": _bytes(options.fusion_threshold_mb),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": _short(options.gloo_timeout_seconds),
        "HOROVOD_LOG_LEVEL": options.log_level,
        "HOROVOD_LOG_HIDE_TIME": _digit(_not(options.log_with_timestamp)),
        "HOROVOD_DYNAMIC_PROCESS_SETS": _digit(options.dynamic_process_sets),
    }
    return {
        name: str(value)
        for name, value in found.items()
        if value is not None and environ.get(name) != str(value)
    }


def _opposite(value: str) -> str:
    """Return the opposite of a switch's value; a word that is none stays, and is refused later."""
    try:
        return "false" if FLAG.read(value) else "true"
    except ValueError:
        return value


def _is_on(value: str) -> bool:
    try:
        return FLAG.read(value)
    except ValueError:
        return True


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _digit(value: bool | None) -> str | None:
    return None if value is None else str(int(value))


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _bytes(megabytes: float | None) -> str | None:
    return None if megabytes is None else str(round(megabytes * _MB))
