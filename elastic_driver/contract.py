"""Names that cross a process boundary: variables of a worker, routes of the driver, store keys.

The torchrun names keep torchrun's meaning, so that an unmodified `init_process_group()`
script runs (https://docs.pytorch.org/docs/stable/elastic/run.html). Launcher, agents and workers
also agree on what each port of `--ports` is for. Pure.
"""

from typing import Literal

# ---- variables of a worker (ours) --------------------------------------------------------
RUN_ID = "ELASTIC_RUN_ID"
HOSTNAME = "ELASTIC_HOSTNAME"
WORKER_ID = "ELASTIC_WORKER_ID"
ROUND = "ELASTIC_ROUND"
RENDEZVOUS = "ELASTIC_RENDEZVOUS"  # http://host:port
TOKEN_FILE = "ELASTIC_TOKEN_FILE"  # noqa: S105 - the path of a 0600 file, never the token
HEARTBEAT_TIMEOUT = "ELASTIC_HEARTBEAT_TIMEOUT"  # seconds
HANG_TIMEOUT = "ELASTIC_HANG_TIMEOUT"  # seconds; 0: off, not set: adapts to the step time
LEAVE_NOTICE = "ELASTIC_LEAVE_NOTICE"  # seconds from a signal to a worker's end; not set: at once
VIRTUAL_WORKERS = "ELASTIC_VIRTUAL_WORKERS"  # --virtual-workers, by default --max-np
VERIFY_STATE = "ELASTIC_VERIFY_STATE"  # "0" with --no-verify-state: the state is not compared
BALANCE = "ELASTIC_BALANCE"  # "1" with --balance: shares of a step follow measured speed
MEASURE_GRADIENTS = "ELASTIC_MEASURE_GRADIENTS"  # "1" where the number of workers is searched
DRIVER_FILE = "ELASTIC_DRIVER_FILE"  # has RENDEZVOUS anew, once another driver has taken over
DRIVER_TIMEOUT = "ELASTIC_DRIVER_TIMEOUT"  # seconds to wait for the next driver; not set: 0
JOB_MARK = "ELASTIC_JOB_MARK"  # a path by which the processes of a job on a host are known
PORTS = "ELASTIC_PORTS"  # FIRST-LAST:LO-HI, where torch listens, of --ports LO-HI
SCRATCH = "ELASTIC_SCRATCH"  # a folder for multiprocessing's sockets, removed by the agent
NEWCOMER = "ELASTIC_NEWCOMER"  # "1": this worker was started for a job that is elastic already
TF_CONFIG = "TF_CONFIG"  # TensorFlow's name; only with --tf-config

# A SIGTERM after this signal comes from the agent and ends the worker at once. By default this
# signal is ignored, so other processes do not notice it.
STOP_MARK = "SIGURG"

# ---- variables of a worker (torchrun's) --------------------------------------------------
TORCHRUN_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
# Each names the accelerators that a process may use; the first one also counts for AMD's.
VISIBLE_DEVICES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),
)

# ---- routes of the driver that our own programs use; each has a row beside its handler ---
EVENTS_PATH = "/v1/events"
STATUS_PATH = "/v1/status"
LIVE_PATH = "/v1/live"
LOGIN_PATH = "/login"
LOGIN_CODES_PATH = "/v1/login-codes"
METRICS_PATH = "/metrics"  # the default of Prometheus
SCALE_PATH = "/v1/scale"
PLAN_PATH = "/v1/plan"
STOP_PATH = "/v1/stop"
STACKS_PATH = "/v1/stacks"
OUTPUT_PATH = "/v1/output"
LOGS_PATH = "/v1/logs"
DRAIN_PATH = "/v1/hosts/{host}:drain"  # {host}: a name as it stands in a URL
UNDRAIN_PATH = "/v1/hosts/{host}:undrain"

# ---- keys of the store: "<scope>/<key>" --------------------------------------------------
# Scopes that the driver fills anew when it goes on with a job; keys of all others are users'.
PASSING_SCOPES = ("agents/", "workers/", "rounds/", "job/", "checks/", "nodes/")
CHECK_SPEC = "checks/spec"  # words.orders.JobSpec for the agents of node checks
JOB_DRIVER = "job/driver"  # documents.DriverTerm, written before anything else
JOB_SPEC = "job/spec"  # words.orders.JobSpec, written once
JOB_WORLD = "job/world"  # documents.World of the newest complete round
JOB_STACKS = "job/stacks"  # the number of the newest request for all stacks
JOB_NOTICE = "job/notice"  # documents.Notice: leave the current round
JOB_SAVE = "job/save"  # documents.SaveRequest: write the final checkpoint
JOB_STATE = "job/state"  # documents.StateQuestion: describe the state of a marked step
JOB_ALLOCATION = "job/allocation"  # documents.Allocation: each worker's share of a step


# Agents and workers that a node check starts have incarnations from here on, and its tasks have
# round numbers from here on, so that names of a check and of the job never collide.
FIRST_OF_CHECKS = 10**9


def spec_key(incarnation: int) -> str:
    """Return the key of the JobSpec for agents of this incarnation."""
    return JOB_SPEC if incarnation < FIRST_OF_CHECKS else CHECK_SPEC


def agent_prefix(host: str, incarnation: int) -> str:
    """Return the prefix of one agent's keys; deleted when its process is gone."""
    return f"agents/{host}.{incarnation}/"


def agent_lease(host: str, incarnation: int) -> str:
    """Return the key of the lease that an agent renews while it lives."""
    return f"agents/{host}.{incarnation}/lease"


def agent_heartbeat(host: str, incarnation: int) -> str:
    """Return the key of the lease that says until when the agent's next heartbeat comes."""
    return f"agents/{host}.{incarnation}/heartbeat"


def agent_usage(host: str, incarnation: int) -> str:
    """Return the key of the `measured.Usage` of an agent's host, written with its heartbeats."""
    return f"agents/{host}.{incarnation}/usage"


def agent_order(host: str, incarnation: int, number: int) -> str:
    """Return the key of the agent's n-th order (documents.Order), counted from 1."""
    return f"agents/{host}.{incarnation}/orders/{number}"


def worker_lease(worker: str) -> str:
    """Return the key of the lease that a worker's heartbeats renew."""
    return f"workers/{worker}/lease"


def worker_half_lease(worker: str) -> str:
    """Return the key of a lease that is renewed with `worker_lease` and half as long."""
    return f"workers/{worker}/half_lease"


def worker_progress(worker: str) -> str:
    """Return the key of a worker's `Progress`, which it writes with each heartbeat."""
    return f"workers/{worker}/progress"


def worker_place(worker: str) -> str:
    """Return the key of the place that a worker is to have, if that is not the one of its start."""
    return f"workers/{worker}/place"


def round_prefix(round_id: int) -> str:
    """Return the prefix of one round's keys; sealed and deleted when the round is over."""
    return f"rounds/{round_id}/"


def worker_id(host: str, slot: int, incarnation: int) -> str:
    """Return a worker's stable name, fit for a file name: `<host>.<slot>.<incarnation>`."""
    return f"{host}.{slot}.{incarnation}"


def worker_prefix(worker: str) -> str:
    """Return the prefix of one worker's keys; deleted when its process is gone."""
    return f"workers/{worker}/"


def host_of_worker(worker: str) -> str:
    """Return the host part of a worker's name."""
    return worker.rsplit(".", 2)[0]


def is_of_check(owner: str) -> bool:
    """Return whether a node check has started this worker or agent (`<host>.<incarnation>`)."""
    incarnation = owner.rpartition(".")[2]
    return incarnation.isdecimal() and int(incarnation) >= FIRST_OF_CHECKS


def agent_named(owner: str) -> tuple[str, int]:
    """Return host and incarnation of an agent by its name in keys, `<host>.<incarnation>`."""
    host, _, incarnation = owner.rpartition(".")
    return host, int(incarnation)


def heartbeat_owner(key: str) -> tuple[str, int] | None:
    """Return host and incarnation of the agent whose heartbeat this is; None for other keys."""
    match key.split("/"):
        case ["agents", owner, "heartbeat"] if owner.rpartition(".")[2].isdecimal():
            return agent_named(owner)
        case _:
            return None


def lease_owner(key: str) -> tuple[Literal["agent", "worker", "half"], str] | None:
    """Return the kind of a lease and its owner, by its key; None for any other key."""
    match key.split("/"):
        case ["agents", owner, "lease"] if owner.rpartition(".")[2].isdecimal():
            return "agent", owner
        case ["workers", owner, "lease"]:
            return "worker", owner
        case ["workers", owner, "half_lease"]:
            return "half", owner
        case _:
            return None


# ---- what the ports of --ports are for ---------------------------------------------------
# The lowest quarter, 16 ports at most, is for torch's stores: an agent names them beforehand, so
# that all workers know the port of a store before it listens. The others are for everything that
# chooses a port when it listens (the rendezvous, probes, gloo). If the two parts were one, gloo
# could take a port that an agent has named a moment before.

PortRange = tuple[int, int]  # the first and the last

_MOST_STORES = 16


def store_ports(ports: PortRange) -> tuple[int, ...]:
    """Return the ports for torch's stores, in order."""
    return _split_ports(ports)[0]


def listening_ports(ports: PortRange) -> tuple[int, ...]:
    """Return the ports for all others, the last one first."""
    stores, others = _split_ports(ports)
    return (others or stores)[::-1]


def ports_in_words(ports: PortRange) -> str:
    """Return the option as it was given."""
    return f"--ports {ports[0]}-{ports[1]}"


def no_port_left(ports: PortRange, purpose: str, where: str) -> str:
    """Return the sentence for a range with no free port."""
    return (
        f"no port of {ports_in_words(ports)} is free on {where} for {purpose}; give a larger range "
        "(docs/firewalls.md says how many a host needs), or end what listens there (ss -ltnp)"
    )


def _split_ports(ports: PortRange) -> tuple[tuple[int, ...], tuple[int, ...]]:
    every = tuple(range(ports[0], ports[1] + 1))
    stores = min(_MOST_STORES, max(1, len(every) // 4))
    return every[:stores], every[stores:]
