"""What a worker starts with: its variables, and the processors that it may use.

The variables have torchrun's meaning where torchrun has them. They are made purely: the agent hands
in its own environment, the job's specification and the order. A worker's token is never among them,
only the path of the file that holds it. Source of the torchrun names and defaults:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables

Processors follow from the host's topology (`--bind`). `numa`: all processors of one NUMA node, that
of the worker's GPU where the system tells it. `core`: cores of its own there, all of a core's
hardware threads together. Only processors count that this process may use itself, so what a cgroup,
Slurm or taskset has left out stays left out. The choice depends on slots, not on ranks: a slot
keeps its processors from one round to the next.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import elastic_driver
from elastic_driver import contract
from elastic_driver.contract import listening_ports
from elastic_driver.words.orders import JobSpec, StartWorkerOrder
from elastic_driver.words.world import SlotInfo
from rendezvous.client_connections import is_loopback

SYS = Path("/sys")
PROC = Path("/proc")
_NVIDIA = "driver/nvidia/gpus"  # below /proc: a folder for each GPU, named by its PCI address


@dataclass(frozen=True, order=True)
class Core:
    """A core, and those of its hardware threads that may be used."""

    node: int  # of NUMA
    package: int
    cpus: tuple[int, ...]


def usable_cores(allowed: Collection[int] | None = None, sys: Path = SYS) -> list[Core]:
    """Return the cores that this process may use, those of a NUMA node together.

    `allowed`: the processors that count; None: those of this process.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = _nodes(sys)
    threads: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(allowed):
        topology = sys / f"devices/system/cpu/cpu{cpu}/topology"
        package = _number(topology / "physical_package_id", 0)
        core = _number(topology / "core_id", cpu)
        threads.setdefault((nodes.get(cpu, 0), package, core), []).append(cpu)
    return sorted(Core(node, package, tuple(c)) for (node, package, _), c in threads.items())


def gpu_nodes(env: Mapping[str, str], sys: Path = SYS, proc: Path = PROC) -> list[int | None]:
    """Return the NUMA node of each GPU that a worker with these variables sees; None: not known."""
    addresses = sorted(path.name.lower() for path in _listed(proc / _NVIDIA))
    addresses = addresses or sorted(p.name for p in _listed(sys / "bus/pci/drivers/amdgpu", ":"))
    nodes = [_number(sys / f"bus/pci/devices/{a}/numa_node", -1) for a in addresses]
    known = [node if node >= 0 else None for node in nodes]
    seen = next((env[name] for name in contract.VISIBLE_DEVICES if name in env), None)
    if seen is None:
        return known
    words = [word.strip() for word in seen.split(",")]  # a UUID names no number: not known
    numbers = [int(word) if word.isdecimal() else len(known) for word in words]
    return [known[number] if number < len(known) else None for number in numbers]


def choose(
    bind: str, slot: int, slots: int, cores: Sequence[Core], nodes: Sequence[int | None] = ()
) -> frozenset[int]:
    """Return the processors of one of a host's slots.

    Args:
        bind: `numa` or `core`.
        slot: from 0.
        slots: of the host; more than it has cores share some.
        cores: those that may be used, at least one.
        nodes: the NUMA node of each slot's GPU; None: not known.
    """
    homes = [_home(s, max(slots, slot + 1), cores, nodes) for s in range(max(slots, slot + 1))]
    there = [core for core in cores if core.node == homes[slot]]
    if bind == "core":
        mates = [s for s, home in enumerate(homes) if home == homes[slot]]
        first = mates.index(slot) * len(there)
        count = len(mates)
        last = (mates.index(slot) + 1) * len(there)
        there = there[first // count : max(last // count, first // count + 1)]
    return frozenset(cpu for core in there for cpu in core.cpus)


def in_words(cpus: Iterable[int]) -> str:
    """Return processors as the kernel lists them: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def apply(pid: int, cpus: Collection[int]) -> None:
    """Bind every thread of a process, which starts no other meanwhile; OSError if that fails."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cpus)


def _home(slot: int, slots: int, cores: Sequence[Core], nodes: Sequence[int | None]) -> int:
    """Return the NUMA node of a slot: that of its GPU, or its part of all cores."""
    of_gpu = nodes[slot] if slot < len(nodes) else None
    if of_gpu is not None and any(core.node == of_gpu for core in cores):
        return of_gpu
    return cores[slot * len(cores) // slots].node


def _nodes(sys: Path) -> dict[int, int]:
    """Return the NUMA node of each processor; empty where there are none."""
    found: dict[int, int] = {}
    for node in _listed(sys / "devices/system/node", "node"):
        number = node.name.removeprefix("node")
        if number.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                text = (node / "cpulist").read_text().strip()
                found |= dict.fromkeys(_listed_numbers(text), int(number))
    return found


def _listed_numbers(text: str) -> Iterable[int]:
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def _listed(folder: Path, part: str = "") -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if part in path.name]
    return []


def _number(file: Path, otherwise: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return otherwise


# Variables that an outer launcher may have left in our environment would confuse the script.
_NOT_INHERITED_PREFIX = "TORCHELASTIC_"
# The folder of the module that has torch listen at the ports of --ports.
TORCH_PORTS = Path(__file__).parent / "torch_ports"
# The folder with the package `horovod` of --horovod.
HOROVOD_ALIAS = Path(elastic_driver.__file__).parent / "horovod" / "alias"
_DEVICES = contract.VISIBLE_DEVICES[0]
_OURS = (str(name) for name in vars(contract).values() if str(name).startswith("ELASTIC_"))
_NOT_INHERITED = frozenset((*contract.TORCHRUN_NAMES, *_OURS))


@dataclass(frozen=True)
class Meeting:
    """The address of the rendezvous for this agent's workers, and the folder of their tokens."""

    host: str
    endpoint: str  # http://host:port
    tokens: Path
    interface: str | None = None  # network interface to the other hosts; None: there are none
    scratch: str | None = None  # a folder that is removed when the agent ends

    def token_file(self, worker: str) -> Path:
        """Return the file with the token of one worker."""
        return self.tokens / f"token-{worker}"

    @property
    def driver_file(self) -> Path | None:
        """The file with the address of a driver that took over; None: there is no folder for it."""
        return None if self.scratch is None else Path(self.scratch, "driver")


def worker_environment(
    inherited: Mapping[str, str], spec: JobSpec, order: StartWorkerOrder, meeting: Meeting
) -> dict[str, str]:
    """Return the whole environment of a new worker.

    `JobSpec.env` overrides inherited variables, and the names of the contract override both.
    The other defaults (threads, buffering, interface) apply only if the user has set no value.
    """
    place = order.place
    common = common_environment(inherited, spec)
    values: dict[str, object] = {
        **_defaults(order, meeting),
        **common,
        "RANK": place.rank,
        "LOCAL_RANK": place.slot,  # names the device
        "WORLD_SIZE": place.size,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.node_count,
        "ROLE_NAME": "default",  # torchrun's, where no role is named
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.size,
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": order.master_port,
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        **_of_horovod(meeting.host, place),
        **_of_slurm(common, place),
        **_interface_here(spec.env, meeting),
        contract.RUN_ID: spec.run_id,
        contract.HOSTNAME: meeting.host,
        contract.WORKER_ID: order.worker,
        contract.ROUND: order.round,
        contract.RENDEZVOUS: meeting.endpoint,
        contract.TOKEN_FILE: meeting.token_file(order.worker),
        contract.HEARTBEAT_TIMEOUT: spec.heartbeat_timeout,
    }
    if spec.virtual_local_rank:
        seen = _devices_of(place.slot, spec.devices_of_a_worker, values.get(_DEVICES))
        values |= {"LOCAL_RANK": 0, _DEVICES: seen}
    optional = {
        contract.TF_CONFIG: order.tf_config,
        contract.NEWCOMER: 1 if order.elastic else None,
        contract.JOB_MARK: inherited.get(contract.JOB_MARK),
        contract.SCRATCH: meeting.scratch,
        contract.DRIVER_FILE: meeting.driver_file,
        contract.HANG_TIMEOUT: spec.hang_timeout,
        contract.VERIFY_STATE: None if spec.verify_state else 0,
        contract.LEAVE_NOTICE: spec.grace_period or None,
        contract.DRIVER_TIMEOUT: spec.driver_timeout or None,
    }
    values.update((name, value) for name, value in optional.items() if value is not None)
    return {name: str(value) for name, value in values.items()}


def _defaults(order: StartWorkerOrder, meeting: Meeting) -> dict[str, object]:
    """Return the variables that a worker gets if its user has set no value."""
    found: dict[str, object] = {}
    if order.place.local_size > 1:
        found["OMP_NUM_THREADS"] = 1  # as torchrun: workers share the cores
    if is_loopback(order.master_addr):
        # Otherwise gloo takes the address of the host's name, which may lead nowhere.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    elif meeting.interface is not None:
        found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = meeting.interface
    return found


def _interface_here(env: Mapping[str, str], meeting: Meeting) -> dict[str, object]:
    """Return the variables for the one of several interfaces that this host has."""
    several = env.get("GLOO_SOCKET_IFNAME", "")
    if meeting.interface not in several.split(","):
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: meeting.interface for name in names if env.get(name) == several}


def _of_horovod(host: str, place: SlotInfo) -> dict[str, object]:
    """Return the variables that horovodrun gives its workers, of the world at their start."""
    return {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": place.rank,
        "HOROVOD_SIZE": place.size,
        "HOROVOD_LOCAL_RANK": place.local_rank,
        "HOROVOD_LOCAL_SIZE": place.local_size,
        "HOROVOD_CROSS_RANK": place.cross_rank,
        "HOROVOD_CROSS_SIZE": place.cross_size,
        "HOROVOD_ELASTIC": 1,
        "HOROVOD_CONTROLLER": "gloo",
    }


def _of_slurm(env: Mapping[str, str], place: SlotInfo) -> dict[str, object]:
    """Return what Slurm tells a task about its place, in a Slurm job.

    What is inherited says the place of the agent or of the batch script: one task, rank 0.
    """
    if "SLURM_JOB_ID" not in env:
        return {}
    return {
        "SLURM_PROCID": place.rank,
        "SLURM_LOCALID": place.slot,
        "SLURM_NODEID": place.node_rank,
        "SLURM_NTASKS": place.size,
        "SLURM_NPROCS": place.size,
    }


def _devices_of(slot: int, count: int, visible: object) -> str:
    """Return the devices that a worker sees, of those that are visible on its host."""
    own = range(slot * count, (slot + 1) * count)
    if visible is None:
        return ",".join(map(str, own))
    devices = str(visible).split(",")
    return ",".join(devices[n].strip() for n in own if n < len(devices))


def common_environment(inherited: Mapping[str, str], spec: JobSpec) -> dict[str, str]:
    """Return the variables that all workers of the job have in common on this host."""
    common = {
        "PYTHONUNBUFFERED": "1",  # else the last lines before a SIGKILL are lost
        # One set and one multi_get per rank in place of a request for each peer.
        "GLOO_ENABLE_STORE_V2_API": "1",
        **{
            name: value
            for name, value in inherited.items()
            if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIX)
        },
        **spec.env,
    }
    first = [str(HOROVOD_ALIAS)] if spec.horovod else []
    if spec.ports is not None:
        first.append(str(TORCH_PORTS))
        own = listening_ports(spec.ports)
        low, high = spec.ports
        common[contract.PORTS] = f"{own[-1]}-{own[0]}:{low}-{high}"
    if first:
        path = (*first, common.get("PYTHONPATH", ""))
        common["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return common
