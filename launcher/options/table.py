"""Every option of `elasticrun`, one frozen record each, in the order of `--help`.

The command line, the environment (`ELASTICRUN_MIN_NP`) and configuration files (`min-np: 2`) are
read with this table, and `--help` is printed from it. `HEADING.fill("struct.field", …)` is an
option whose value is copied to that field, which also has its default; `HEADING.add` returns a
record that a rule of `launcher.plan` reads as `values[RECORD]`.
"""

from typing import Any

from launcher.options import kinds as k
from launcher.options.record import Heading, Option

# fmt: off
HOSTS = Heading("Hosts (one of them; default: this machine)")
HOST_DISCOVERY_SCRIPT = HOSTS.add("host-discovery-script", k.text("FILE"), None,
    "A program that prints the hosts there are now, one 'host' or 'host:slots' a line. It is run "
    "again and again; hosts join and leave the job as they come and go.")
HOSTS.fill("driver.discovery_interval", "discovery-interval", k.seconds(),
    "Seconds between two runs of the discovery script, or two reads of the hostfile.")
HOST_DISCOVERY = HOSTS.add("host-discovery", k.text("NAME[:ARG]"), None,
    "A source of hosts that another package brings, with its argument (docs/hosts.md). "
    "script:FILE and hostfile:FILE are --host-discovery-script FILE and --hostfile FILE.")
DISCOVERY_TIMEOUT = HOSTS.add("discovery-timeout", k.seconds(), 30.0,
    "A discovery script that runs longer is killed; the last known hosts stay.")
HOSTS_LIST = HOSTS.add("hosts", k.text("h1:2,h2:2"), None,
    "Fixed hosts with their slots; n[01-04]:2 stands for four of them.",
    aliases=("-H", "--host"))
HOSTFILE = HOSTS.add("hostfile", k.text("FILE"), None,
    "Hosts from a file, 'host', 'host:4' or 'host slots=4' a line; read again when it changes.",
    aliases=("--host-file", "--machinefile"))
STANDALONE = HOSTS.add("standalone", k.flag(), False,
    "This machine only, whatever else is configured.")
SLOTS_PER_HOST = HOSTS.add("slots-per-host", k.whole(least=1), None,
    "Slots of a host that is listed without a number.",
    aliases=("--slots",), shown="1")

JOIN = Heading("Nodes that join by themselves (docs/joining.md)")
SERVE = JOIN.add("serve", k.flag(), False,
    "Run no workers here: hold the job, and train on the nodes that --join it.")
JOIN_AT = JOIN.add("join", k.endpoint(), None,
    "Make this node a host of the job that is served at HOST:PORT, with --nproc-per-node workers. "
    "It may start before the server, and come back after leaving (Ctrl-C, SIGTERM).")
RDZV_ENDPOINT = JOIN.add("rdzv-endpoint", k.endpoint(), ("127.0.0.1", 0),
    "Address and port the job's rendezvous listens on; 0.0.0.0 for all addresses. With --nnodes "
    "of more than 1 and no list of hosts, the same command is meant for every node: the one that "
    "is HOST serves, and all join.",
    shown="this machine only, or the address that remote hosts reach; any free port")
RDZV_BACKEND = JOIN.add("rdzv-backend", k.choice("c10d", "static"), None,
    "Accepted as in torchrun; the job always has its own rendezvous.")
NODE_RANK = JOIN.add("node-rank", k.whole(), None,
    "Node 0 serves, the others join it. Ranks are given in the order in which nodes come.",
    shown="NODE_RANK or RANK in the environment, where MASTER_ADDR counts")
MASTER_ADDR = JOIN.add("master-addr", k.text("HOST"), None,
    "Where node 0 serves, for nodes that are started with --node-rank.",
    shown="MASTER_ADDR in the environment, else 127.0.0.1")
MASTER_PORT = JOIN.add("master-port", k.whole("PORT", least=1), None,
    "The port there.",
    shown="MASTER_PORT in the environment, else 29500")
TOKEN_FILE = JOIN.add("token-file", k.text("FILE"), None,
    "A file that only you can read, with the secret that lets nodes join; the same text on the "
    "server and on every node.",
    shown="the run's own token in a shared --state-dir, else derived from --run-id")

SIZE = Heading("Size of the job")
NUM_PROC = SIZE.add("num-proc", k.whole(least=1), None,
    "Workers to start with. Once training, the job goes on with what is left.",
    aliases=("-np", "-n"), shown="every slot of fixed hosts, else --min-np")
MIN_NP = SIZE.add("min-np", k.whole(least=1), None,
    "Never train with fewer workers. Also enough to start with once --start-timeout is over.",
    aliases=("--min-num-proc",), shown="1, and the start waits for -np")
MAX_NP = SIZE.add("max-np", k.whole(least=1), None,
    "Never train with more workers.",
    aliases=("--max-num-proc",), shown="-np for fixed hosts, no limit with a discovery script")
NNODES = SIZE.add("nnodes", k.node_range(), None,
    "The same in hosts (as torchrun has it): MIN to MAX hosts of --nproc-per-node workers each.")
NPROC_PER_NODE = SIZE.add("nproc-per-node", k.node_workers(), None,
    "Workers on each host: a number, or this machine's GPUs (gpu), cores (cpu), or GPUs if it has "
    "any and cores otherwise (auto).",
    shown="1")
NODE_UNIT = SIZE.fill("settings.node_unit", "node-unit", k.whole(least=1),
    "Train on a multiple of N hosts. Workers of surplus hosts wait until they make up a unit, or "
    "replace one that fails; with fewer than N hosts the job waits.")
VIRTUAL_WORKERS = SIZE.add("virtual-workers", k.whole(least=1), None,
    "For elastic.FixedBatch: the workers the script is written for; however many there are, a "
    "step trains what N would.",
    shown="--max-np")
SIZE.fill("settings.replace_slow", "replace-slow", k.flag(),
    "Replace a worker that computes slowly for long by one on another host, where --max-np leaves "
    "a slot free; no step is lost.")
BALANCE = SIZE.add("balance", k.flag(), False,
    "For elastic.FixedBatch: slow workers are given less of each step; the result stays the same.")

POLICY = Heading("What to do when workers and hosts fail (times in seconds)")
POLICY.fill("settings.reset_limit", "reset-limit", k.whole(),
    "End the job after this many membership changes of any kind.",
    shown="no limit")
POLICY.fill("settings.max_restarts", "max-restarts", k.whole(),
    "End the job after this many failures in all.",
    shown="no limit as long as training gets anywhere between failures")
POLICY.fill("settings.fruitless_restarts", "fruitless-restarts", k.whole(),
    "End the job after this many failures in a row without a finished step in between.")
POLICY.fill("settings.host_failures", "host-failures", k.whole("K", least=1),
    "A host that fails K times within --host-failure-window is put in cool-down.",
    shown="3 failures of workers that never finished a step")
POLICY.fill("settings.host_failure_window", "host-failure-window", k.seconds(),
    "The window in which a host's failures count.")
BLACKLIST_COOLDOWN_RANGE = POLICY.fill(
    "settings.blacklist_cooldown", "blacklist-cooldown-range", k.seconds_range(),
    "The first cool-down of a host, and the longest one after doubling.")
ELASTIC_TIMEOUT = POLICY.fill("settings.elastic_timeout", "elastic-timeout", k.seconds(),
    "Give up when fewer than --min-np workers have been available for this long.")
START_TIMEOUT = POLICY.fill("settings.start_timeout", "start-timeout", k.seconds(),
    "Wait this long for -np workers before settling for --min-np, or giving up.")
POLICY.fill("settings.heartbeat_timeout spec.heartbeat_timeout backend.heartbeat_timeout",
    "heartbeat-timeout", k.seconds(),
    "An agent or worker that is silent for this long is lost.")
POLICY.fill("settings.hang_timeout spec.hang_timeout", "hang-timeout", k.seconds(positive=False),
    "A worker that lives but makes no progress for this long hangs; 0: never (docs/hangs.md).",
    shown="20 times the usual step, at least 60")
POLICY.fill("settings.grace_period spec.leave_notice", "grace-period", k.seconds(positive=False),
    "Time for the other workers to finish after the first one has. Also the time to leave a host "
    "whose agent gets SIGTERM, SIGUSR1 or SIGUSR2 (preemption, Slurm's --signal), and the time to "
    "leave and write a checkpoint when elasticrun gets SIGUSR1 or SIGUSR2.")
POLICY.fill("settings.stop_grace spec.grace_period", "stop-grace", k.seconds(positive=False),
    "Time between SIGTERM and SIGKILL for a worker that is told to stop.")
POLICY.fill("settings.last_call", "last-call", k.seconds(positive=False),
    "Changes that arrive within this time of each other become one round.")

START = Heading("Starting workers")
BACKEND = START.add("backend", k.text("auto|local|ssh|slurm|mpi|NAME"), "auto",
    "How agents get onto hosts: auto takes local for names of this machine and ssh for all "
    "others, and slurm inside an allocation when no hosts are named. A package of your own may "
    "bring another one (docs/starters.md).")
START.fill("backend.ssh_port", "ssh-port", k.whole("PORT", least=1),
    "The port that sshd listens on, on every host (ssh and mpi).",
    aliases=("-p",), shown="as in ssh's configuration")
START.fill("backend.ssh_identity_file", "ssh-identity-file", k.text("FILE"),
    "The private key for ssh (ssh and mpi).",
    aliases=("-i",), shown="as in ssh's configuration")
NETWORK_INTERFACES = START.add("network-interfaces", k.names("eth0,eth1"), None,
    "Interfaces the workers talk over (sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME), and that "
    "the rendezvous listens on. By default the one that leads to the other hosts.",
    aliases=("--network-interface", "--nics"))
ENV = START.add("env", k.variables(), (),
    "A variable for the workers; NAME alone passes on what it is here. May be given several "
    "times. Workers on other hosts get some without asking (docs/hosts.md).",
    aliases=("-x",))
START.fill("spec.preload", "preload", k.names("MODULES"),
    "Modules that a warm process has imported before a worker is forked from it, with commas "
    "between them (docs/warm-workers.md).")
WARM = START.fill("spec.warm", "warm", k.whole_or("auto"),
    "Processes kept warm on each host for workers to come; 0 starts every worker afresh.",
    shown="auto: one, if the command is Python and imports more than the "
    "standard library; none with --tf-config")

TENSORFLOW = Heading("TensorFlow (docs/tensorflow.md)")
TF_CONFIG = TENSORFLOW.add("tf-config", k.flag(), False,
    "Give each worker TF_CONFIG, for tf.distribute. When workers come or go, all are started "
    "again with a new one; BackupAndRestore goes on where they were.")
TF_ROLES = TENSORFLOW.add("tf-roles", k.tf_roles(), None,
    "Their roles, handed out in this order, the oldest first; worker=* are all the others. "
    "Implies --tf-config.",
    shown="worker=*")

CHECK = Heading("Checking the nodes before training (docs/node-checks.md)")
NETWORK_CHECK = CHECK.add("network-check", k.flag(), False,
    "Run short tasks on all hosts in pairs before the job starts; it starts without the faulty "
    "ones.")
COMM_PERF_TEST = CHECK.add("comm-perf-test", k.flag(), False,
    "The same, and show bandwidth and latency of the network.")
STRAGGLER_DETECTION = CHECK.add("straggler-detection", k.flag(), False,
    "The same, train a small transformer too, and name hosts more than twice as slow as usual.")
EXCLUDE_STRAGGLER = CHECK.add("exclude-straggler", k.flag(), False,
    "The same, and start without the slow ones.")
CHECK_TIMEOUT = CHECK.add("check-timeout", k.seconds(), 120.0,
    "A task that takes longer has failed; also the time for agents to come up for the check.")

OUTPUT = Heading("Output")
OUTPUT.fill("spec.log_dir", "log-dir", k.text("DIR"),
    "Also write each worker's output to files below DIR.",
    aliases=("--output-filename",))
TEE = OUTPUT.fill("spec.tee", "tee", k.streams(),
    "With --log-dir: streams that go both to the terminal and to files.",
    aliases=("-t",))
OUTPUT.fill("spec.redirects", "redirects", k.streams(),
    "With --log-dir: streams that go to files only. 0 none, 1 stdout, 2 stderr, 3 both; per local "
    "rank as 0:3,1:1.",
    aliases=("-r",))
OUTPUT.fill("spec.local_ranks_filter", "local-ranks-filter", k.numbers("0,1"),
    "Show only these local ranks of each host on the terminal.")
OUTPUT.fill("spec.timestamp", "prefix-output-with-timestamp", k.flag(),
    "Put the time in front of every line of the workers.",
    aliases=("--prefix-timestamp",))
LOG_FORMAT = OUTPUT.add("log-format", k.choice("text", "json"), "text",
    "Form of elasticrun's own lines on stderr.")
VERBOSE = OUTPUT.add("verbose", k.flag(), False,
    "Say more; with --dry-run: where each value came from.",
    aliases=("-v",))
QUIET = OUTPUT.add("quiet", k.flag(), False,
    "Say only what failed.",
    aliases=("-q",))

STATE = Heading("Identity and state")
RUN_ID = STATE.add("run-id", k.text("ID"), None,
    "The job's name, in logs and in the state directory.",
    aliases=("--rdzv-id",), shown="time and a random suffix")
STATE_DIR = STATE.add("state-dir", k.text("DIR"), None,
    "The folder for the event log of each run, DIR/ID/events.jsonl.",
    shown="~/.local/state/elastic-driver")

OTHER = Heading("Other")
CONFIG_FILE = OTHER.add("config-file", k.text("FILE.yaml"), None,
    "Options from a YAML file, 'min-np: 2' a line. Flags win over ELASTICRUN_<OPTION> variables, "
    "those over the file, the file over defaults.")
DRY_RUN = OTHER.add("dry-run", k.flag(), False,
    "Check everything, show the plan, start nothing.")
OTHER.fill("driver.debug", "debug", k.flag(),
    "Check the driver's own invariants after every event.")
CHECK_BUILD = OTHER.add("check-build", k.flag(), False,
    "Show what this installation can do.")
VERSION = OTHER.add("version", k.flag(), False,
    "Show the version.")
HELP = OTHER.add("help", k.flag(), False,
    "Show this.",
    aliases=("-h",))
# fmt: on

_HEADINGS = (HOSTS, JOIN, SIZE, POLICY, START, TENSORFLOW, CHECK, OUTPUT, STATE, OTHER)
GROUPS = tuple(heading.text for heading in _HEADINGS)
OPTIONS: tuple[Option[Any], ...] = tuple(o for heading in _HEADINGS for o in heading.options)

# Options of torchrun, horovodrun and mpirun without a counterpart → what to do instead.
FOREIGN: dict[str, str] = {
    "--rdzv-conf": "use --start-timeout, --elastic-timeout and --last-call",
    "--mpi": "use --backend mpi",
    "--blacklist": "use --host-failures and --blacklist-cooldown-range",
    "--wdir": "change folder first: cd DIR && elasticrun ...",
    "-wdir": "change folder first: cd DIR && elasticrun ...",
    "--log-level": "use -v or -q",
    "--fusion-threshold-mb": "DistributedDataParallel has bucket_cap_mb: elastic.wrap(model, ...)",
}

# Those that are not needed → how many values each takes, and why; they are ignored with a remark.
NEEDLESS: dict[str, tuple[int, str]] = {
    "--monitor-interval": (1, "a worker's end is noticed at once"),
    "--no-python": (0, "a COMMAND that does not end in .py is run as it is"),
    "--start-method": (1, "workers are separate programs"),
    "--role": (1, "all workers have the same role"),
    "--gloo": (0, "the script chooses, elastic.init(backend='gloo')"),
    "--use-gloo": (0, "the script chooses, elastic.init(backend='gloo')"),
    "--disable-cache": (0, "hosts are examined each time"),
    "--tag-output": (0, "every line begins with its worker's rank"),
    "-tag-output": (0, "every line begins with its worker's rank"),
    "--oversubscribe": (0, "a host has as many slots as you say"),
    "--allow-run-as-root": (0, "nobody is refused"),
    "--bind-to": (1, "workers are not bound to cores; begin COMMAND with numactl or taskset"),
    "--map-by": (1, "hosts are filled one after the other"),
}

# torchrun reads each of these from PET_<NAME> too; a launcher above us may set them (Kubeflow's
# PyTorchJob does, for elastic jobs).
PET_OPTIONS = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--standalone", "--max-restarts"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
)
