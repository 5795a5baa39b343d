"""The variables that a worker starts with, with torchrun's meaning where torchrun has them.

Pure: the agent hands in its own environment, the job's specification and the order. A worker's
token is never among them, only the path of the file that holds it.

Source of the torchrun names and defaults:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import elastic_driver
from elastic_driver import contract
from elastic_driver.contract import listening_ports
from elastic_driver.words.orders import JobSpec, StartWorkerOrder
from elastic_driver.words.world import SlotInfo
from rendezvous.client_connections import is_loopback

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
