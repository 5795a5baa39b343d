"""Every option of `elasticrun`, one frozen record each; the order is the order of `--help`.

The table is data: `launcher.commandline` reads argv with it, `launcher.help` prints it, and the
environment (`ELASTICRUN_MIN_NP`) and configuration files (`min-np: 2`) follow from the names.
Values are looked up with the record itself, `values[MIN_NP]`, so they carry their type.
Defaults that are settings of the job stand in `elastic_driver.settings` and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elastic_driver.settings import Settings
from launcher import kinds
from launcher.kinds import Kind

T = TypeVar("T")

HOSTS = "Hosts (one of them; default: this machine)"
SIZE = "Size of the job"
POLICY = "What to do when workers and hosts fail (times in seconds)"
START = "Starting workers"
CHECK = "Checking the nodes before training (docs/node-checks.md)"
OUTPUT = "Output"
STATE = "Identity and state"
OTHER = "Other"
GROUPS = (HOSTS, SIZE, POLICY, START, CHECK, OUTPUT, STATE, OTHER)

_DEFAULTS = Settings()


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: each record is unique
class Option(Generic[T]):
    """One option: its long name, how its value is read, and what it means.

    Attributes:
        name: the long name without dashes, hyphenated; also the key in a configuration file.
        kind: how the value is read.
        default: the value when nobody says anything.
        group: the heading in `--help`.
        help: one or two lines for users.
        aliases: other spellings with their dashes, e.g. `-np`.
        shown: the default in words, where the value itself does not say it.
    """

    name: str
    kind: Kind[Any]
    default: T
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    shown: str = ""

    @property
    def long(self) -> str:
        """The name as typed: `--min-np`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it: `ELASTICRUN_MIN_NP`."""
        return "ELASTICRUN_" + self.name.upper().replace("-", "_")


# ---- hosts -------------------------------------------------------------------------------

HOST_DISCOVERY_SCRIPT: Option[str | None] = Option(
    "host-discovery-script",
    kinds.text("FILE"),
    None,
    HOSTS,
    "A program that prints the hosts there are now, one 'host' or 'host:slots' a line. It is run "
    "again and again; hosts join and leave the job as they come and go.",
)
DISCOVERY_INTERVAL: Option[float] = Option(
    "discovery-interval",
    kinds.seconds(),
    1.0,
    HOSTS,
    "Seconds between two runs of the discovery script, or two looks at the hostfile.",
)
DISCOVERY_TIMEOUT: Option[float] = Option(
    "discovery-timeout",
    kinds.seconds(),
    30.0,
    HOSTS,
    "A discovery script that runs longer is killed; the last known hosts stay.",
)
HOSTS_LIST: Option[str | None] = Option(
    "hosts",
    kinds.text("h1:2,h2:2"),
    None,
    HOSTS,
    "Fixed hosts with their slots; n[01-04]:2 stands for four of them.",
    aliases=("-H", "--host"),
)
HOSTFILE: Option[str | None] = Option(
    "hostfile",
    kinds.text("FILE"),
    None,
    HOSTS,
    "Hosts from a file, 'host', 'host:4' or 'host slots=4' a line; read again when it changes.",
    aliases=("--host-file",),
)
STANDALONE: Option[bool] = Option(
    "standalone", kinds.flag(), False, HOSTS, "This machine only, whatever else is configured."
)
SLOTS_PER_HOST: Option[int | None] = Option(
    "slots-per-host",
    kinds.whole(least=1),
    None,
    HOSTS,
    "Slots of a host that is listed without a number.",
    aliases=("--slots",),
    shown="1",
)

# ---- size --------------------------------------------------------------------------------

NUM_PROC: Option[int | None] = Option(
    "num-proc",
    kinds.whole(least=1),
    None,
    SIZE,
    "Workers to start with. Once training, the job goes on with what is left.",
    aliases=("-np", "-n"),
    shown="every slot of fixed hosts, else --min-np",
)
MIN_NP: Option[int | None] = Option(
    "min-np",
    kinds.whole(least=1),
    None,
    SIZE,
    "Never train with fewer workers. Also enough to start with once --start-timeout is over.",
    aliases=("--min-num-proc",),
    shown="1, and the start waits for -np",
)
MAX_NP: Option[int | None] = Option(
    "max-np",
    kinds.whole(least=1),
    None,
    SIZE,
    "Never train with more workers.",
    aliases=("--max-num-proc",),
    shown="-np for fixed hosts, no limit with a discovery script",
)
NNODES: Option[tuple[int, int] | None] = Option(
    "nnodes",
    kinds.node_range(),
    None,
    SIZE,
    "The same in hosts (as torchrun has it): MIN to MAX hosts of --nproc-per-node workers each.",
)
NPROC_PER_NODE: Option[int | str | None] = Option(
    "nproc-per-node",
    kinds.node_workers(),
    None,
    SIZE,
    "Workers on each host: a number, or this machine's GPUs (gpu), cores (cpu), or GPUs if it has "
    "any and cores otherwise (auto).",
    shown="1",
)

VIRTUAL_WORKERS: Option[int | None] = Option(
    "virtual-workers",
    kinds.whole(least=1),
    None,
    SIZE,
    "For elastic.FixedBatch: the workers the script is written for; however many there are, a step "
    "trains what N would.",
    shown="--max-np",
)
BALANCE: Option[bool] = Option(
    "balance",
    kinds.flag(),
    False,
    SIZE,
    "For elastic.FixedBatch: faster workers train more of each step; the result stays the same.",
)

# ---- policy ------------------------------------------------------------------------------

RESET_LIMIT: Option[int | None] = Option(
    "reset-limit",
    kinds.whole(),
    _DEFAULTS.reset_limit,
    POLICY,
    "End the job after this many membership changes of any kind.",
    shown="no limit",
)
MAX_RESTARTS: Option[int | None] = Option(
    "max-restarts",
    kinds.whole(),
    _DEFAULTS.max_restarts,
    POLICY,
    "End the job after this many failures in all.",
    shown="no limit as long as training gets anywhere between failures",
)
FRUITLESS_RESTARTS: Option[int] = Option(
    "fruitless-restarts",
    kinds.whole(),
    _DEFAULTS.fruitless_restarts,
    POLICY,
    "End the job after this many failures in a row without a finished step in between.",
)
HOST_FAILURES: Option[int | None] = Option(
    "host-failures",
    kinds.whole("K", least=1),
    _DEFAULTS.host_failures,
    POLICY,
    "A host that fails K times within --host-failure-window is put in cool-down.",
    shown="3 failures of workers that never finished a step",
)
HOST_FAILURE_WINDOW: Option[float] = Option(
    "host-failure-window",
    kinds.seconds(),
    _DEFAULTS.host_failure_window,
    POLICY,
    "The window in which a host's failures count.",
)
BLACKLIST_COOLDOWN_RANGE: Option[tuple[float, float]] = Option(
    "blacklist-cooldown-range",
    kinds.seconds_range(),
    _DEFAULTS.blacklist_cooldown,
    POLICY,
    "A host's first cool-down, and the longest one after doubling.",
)
ELASTIC_TIMEOUT: Option[float] = Option(
    "elastic-timeout",
    kinds.seconds(),
    _DEFAULTS.elastic_timeout,
    POLICY,
    "Give up when fewer than --min-np workers were to be had for this long.",
)
START_TIMEOUT: Option[float] = Option(
    "start-timeout",
    kinds.seconds(),
    _DEFAULTS.start_timeout,
    POLICY,
    "Wait this long for -np workers before settling for --min-np, or giving up.",
)
HEARTBEAT_TIMEOUT: Option[float] = Option(
    "heartbeat-timeout",
    kinds.seconds(),
    _DEFAULTS.heartbeat_timeout,
    POLICY,
    "An agent or worker that is silent for this long is lost.",
)
HANG_TIMEOUT: Option[float | None] = Option(
    "hang-timeout",
    kinds.seconds(positive=False),
    _DEFAULTS.hang_timeout,
    POLICY,
    "A worker that lives but makes no progress for this long hangs; 0: never (docs/hangs.md).",
    shown="20 times the usual step, at least 60",
)
GRACE_PERIOD: Option[float] = Option(
    "grace-period",
    kinds.seconds(positive=False),
    _DEFAULTS.grace_period,
    POLICY,
    "After the first worker finished: time for the others to finish too. After an agent was sent "
    "SIGTERM, SIGUSR1 or SIGUSR2 (preemption, Slurm's --signal): time for its host to be left.",
)
STOP_GRACE: Option[float] = Option(
    "stop-grace",
    kinds.seconds(positive=False),
    _DEFAULTS.stop_grace,
    POLICY,
    "Time between SIGTERM and SIGKILL for a worker that is told to stop.",
)
LAST_CALL: Option[float] = Option(
    "last-call",
    kinds.seconds(positive=False),
    _DEFAULTS.last_call,
    POLICY,
    "Changes that arrive within this time of each other become one round.",
)

# ---- start-up ----------------------------------------------------------------------------

BACKEND: Option[str] = Option(
    "backend",
    kinds.choice("auto", "local", "ssh", "slurm", "mpi", "ray"),
    "auto",
    START,
    "How agents get onto hosts: auto takes local for names of this machine and ssh for all others "
    "(docs/hosts.md). The remaining ones do not exist yet.",
)
SSH_PORT: Option[int | None] = Option(
    "ssh-port",
    kinds.whole("PORT", least=1),
    None,
    START,
    "The port that sshd listens on, on every host.",
    aliases=("-p",),
    shown="as in ssh's configuration",
)
SSH_IDENTITY_FILE: Option[str | None] = Option(
    "ssh-identity-file",
    kinds.text("FILE"),
    None,
    START,
    "The private key for ssh.",
    aliases=("-i",),
    shown="as in ssh's configuration",
)
NETWORK_INTERFACES: Option[tuple[str, ...] | None] = Option(
    "network-interfaces",
    kinds.names("eth0,eth1"),
    None,
    START,
    "Interfaces the workers talk over (sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME), and that "
    "the rendezvous listens on. By default the one that leads to the other hosts.",
    aliases=("--network-interface", "--nics"),
)
ENV: Option[tuple[tuple[str, str], ...]] = Option(
    "env",
    kinds.variables(),
    (),
    START,
    "A variable for the workers; may be given several times.",
    aliases=("-x",),
)

PRELOAD: Option[tuple[str, ...]] = Option(
    "preload",
    kinds.names("MODULES"),
    ("torch",),
    START,
    "Modules that a warm process has imported before a worker is forked from it, with commas "
    "between them (docs/warm-workers.md).",
)
WARM: Option[int | None] = Option(
    "warm",
    kinds.whole_or("auto"),
    None,
    START,
    "Processes kept warm on each host for workers to come; 0 starts every worker afresh.",
    shown="auto: one, if the command is Python and imports more than the standard library",
)

# ---- node check --------------------------------------------------------------------------

NETWORK_CHECK: Option[bool] = Option(
    "network-check",
    kinds.flag(),
    False,
    CHECK,
    "Run short tasks on all hosts in pairs before the job starts; it starts without the faulty "
    "ones.",
)
COMM_PERF_TEST: Option[bool] = Option(
    "comm-perf-test",
    kinds.flag(),
    False,
    CHECK,
    "The same, and show bandwidth and latency of the network.",
)
STRAGGLER_DETECTION: Option[bool] = Option(
    "straggler-detection",
    kinds.flag(),
    False,
    CHECK,
    "The same, train a small transformer too, and name hosts more than twice as slow as usual.",
)
EXCLUDE_STRAGGLER: Option[bool] = Option(
    "exclude-straggler", kinds.flag(), False, CHECK, "The same, and start without the slow ones."
)
CHECK_TIMEOUT: Option[float] = Option(
    "check-timeout",
    kinds.seconds(),
    120.0,
    CHECK,
    "A task that takes longer has failed; also the time for agents to come up for the check.",
)

# ---- output ------------------------------------------------------------------------------

LOG_DIR: Option[str | None] = Option(
    "log-dir",
    kinds.text("DIR"),
    None,
    OUTPUT,
    "Also write each worker's output to files below DIR.",
    aliases=("--output-filename",),
)
TEE: Option[str] = Option(
    "tee",
    kinds.streams(),
    "3",
    OUTPUT,
    "With --log-dir: streams that go both to the terminal and to files.",
    aliases=("-t",),
)
REDIRECTS: Option[str] = Option(
    "redirects",
    kinds.streams(),
    "0",
    OUTPUT,
    "With --log-dir: streams that go to files only. 0 none, 1 stdout, 2 stderr, 3 both; per local "
    "rank as 0:3,1:1.",
    aliases=("-r",),
)
LOCAL_RANKS_FILTER: Option[tuple[int, ...] | None] = Option(
    "local-ranks-filter",
    kinds.numbers("0,1"),
    None,
    OUTPUT,
    "Show only these local ranks of each host on the terminal.",
)
PREFIX_OUTPUT_WITH_TIMESTAMP: Option[bool] = Option(
    "prefix-output-with-timestamp",
    kinds.flag(),
    False,
    OUTPUT,
    "Put the time in front of every line of the workers.",
    aliases=("--prefix-timestamp",),
)
LOG_FORMAT: Option[str] = Option(
    "log-format",
    kinds.choice("text", "json"),
    "text",
    OUTPUT,
    "Form of elasticrun's own lines on stderr.",
)
VERBOSE: Option[bool] = Option(
    "verbose", kinds.flag(), False, OUTPUT, "Say more; with --dry-run: where each value came from.",
    aliases=("-v",),
)  # fmt: skip
QUIET: Option[bool] = Option(
    "quiet", kinds.flag(), False, OUTPUT, "Say only what failed.", aliases=("-q",)
)

# ---- identity and state ------------------------------------------------------------------

RUN_ID: Option[str | None] = Option(
    "run-id",
    kinds.text("ID"),
    None,
    STATE,
    "The job's name, in logs and in the state directory.",
    aliases=("--rdzv-id",),
    shown="time and a random suffix",
)
STATE_DIR: Option[str | None] = Option(
    "state-dir",
    kinds.text("DIR"),
    None,
    STATE,
    "Where the event log of each run lies, DIR/ID/events.jsonl.",
    shown="~/.local/state/elastic-driver",
)

# ---- other -------------------------------------------------------------------------------

RDZV_ENDPOINT: Option[tuple[str, int]] = Option(
    "rdzv-endpoint",
    kinds.endpoint(),
    ("127.0.0.1", 0),
    OTHER,
    "Address and port the job's rendezvous listens on; 0.0.0.0 for all addresses.",
    shown="this machine only, or the address that remote hosts reach; any free port",
)
CONFIG_FILE: Option[str | None] = Option(
    "config-file",
    kinds.text("FILE.yaml"),
    None,
    OTHER,
    "Options from a YAML file, 'min-np: 2' a line. Flags win over ELASTICRUN_<OPTION> variables, "
    "those over the file, the file over defaults.",
)
DRY_RUN: Option[bool] = Option(
    "dry-run", kinds.flag(), False, OTHER, "Check everything, show the plan, start nothing."
)
DEBUG: Option[bool] = Option(
    "debug", kinds.flag(), False, OTHER, "Check the driver's own invariants after every event."
)
CHECK_BUILD: Option[bool] = Option(
    "check-build", kinds.flag(), False, OTHER, "Show what this installation can do."
)
VERSION: Option[bool] = Option("version", kinds.flag(), False, OTHER, "Show the version.")
HELP: Option[bool] = Option("help", kinds.flag(), False, OTHER, "Show this.", aliases=("-h",))

OPTIONS: tuple[Option[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)

FOREIGN: dict[str, str] = {
    "--rdzv-backend": "not needed: the job brings its own rendezvous (--rdzv-endpoint binds it)",
    "--rdzv-conf": "use --start-timeout, --elastic-timeout and --last-call",
    "--node-rank": "not needed: ranks are assigned by the driver",
    "--master-addr": "not needed; to bind the rendezvous use --rdzv-endpoint HOST:PORT",
    "--master-port": "not needed; to bind the rendezvous use --rdzv-endpoint HOST:PORT",
    "--monitor-interval": "not needed: a worker's end is noticed at once",
    "--no-python": "not needed: a COMMAND that does not end in .py is run as it is",
    "--gloo": "not needed: the script chooses, elastic.init(backend='gloo')",
    "--mpi": "use --backend mpi",
    "--start-method": "not needed: workers are separate programs",
    "--role": "not needed: all workers have the same role",
    "--blacklist": "use --host-failures and --blacklist-cooldown-range",
}
"""Options of torchrun and horovodrun that people will try, and what to do instead."""
