"""The variables a worker is born with, with torchrun's meaning where torchrun has them.

Pure: the agent hands in its own environment, the job's specification and the order. The
token is never among them, only the path of the file that holds it.

Source of the torchrun names and defaults:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec, StartWorkerOrder

# What an outer launcher may have left in our own environment would confuse the script.
_NOT_INHERITED_PREFIX = "TORCHELASTIC_"
_NOT_INHERITED = frozenset(
    (
        *contract.TORCHRUN_NAMES,
        contract.RUN_ID,
        contract.HOSTNAME,
        contract.WORKER_ID,
        contract.ROUND,
        contract.RENDEZVOUS,
        contract.TOKEN_FILE,
        contract.HEARTBEAT_TIMEOUT,
        contract.HANG_TIMEOUT,
        contract.LEAVE_NOTICE,
        contract.VIRTUAL_WORKERS,
        contract.BALANCE,
        contract.SCRATCH,
    )
)


@dataclass(frozen=True)
class Meeting:
    """Where the workers of this agent find the rendezvous, and the file with their token."""

    host: str
    endpoint: str  # http://host:port
    token_file: str
    interface: str | None = None  # that leads to the other hosts; None: there are none
    scratch: str | None = None  # a folder that is removed when the agent ends


def worker_environment(
    inherited: Mapping[str, str], spec: JobSpec, order: StartWorkerOrder, meeting: Meeting
) -> dict[str, str]:
    """The whole environment of a new worker.

    `JobSpec.env` overrides what is inherited, and the names of the contract override both.
    The remaining defaults (threads, buffering, interface) yield to whatever the user has set.
    """
    env = common_environment(inherited, spec)
    for name, value in _defaults(order, meeting.interface).items():
        env.setdefault(name, value)
    env.update(_torchrun_names(spec, order))
    if order.tf_config is not None:
        env[contract.TF_CONFIG] = order.tf_config
    if meeting.scratch is not None:
        env[contract.SCRATCH] = meeting.scratch
    if spec.hang_timeout is not None:
        env[contract.HANG_TIMEOUT] = repr(spec.hang_timeout)
    if spec.leave_notice:
        env[contract.LEAVE_NOTICE] = repr(spec.leave_notice)
    env.update(
        {
            contract.RUN_ID: spec.run_id,
            contract.HOSTNAME: meeting.host,
            contract.WORKER_ID: order.worker,
            contract.ROUND: str(order.round),
            contract.RENDEZVOUS: meeting.endpoint,
            contract.TOKEN_FILE: meeting.token_file,
            contract.HEARTBEAT_TIMEOUT: repr(spec.heartbeat_timeout),
        }
    )
    return env


def common_environment(inherited: Mapping[str, str], spec: JobSpec) -> dict[str, str]:
    """What all workers of the job share on this host, whichever place they take."""
    env = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIX)
    }
    env.update(spec.env)
    env.setdefault("PYTHONUNBUFFERED", "1")  # else the last lines before a SIGKILL are lost
    # One set and one multi_get per rank in place of a request for each peer.
    env.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    return env


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine only; a name other than localhost does not."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _defaults(order: StartWorkerOrder, interface: str | None) -> dict[str, str]:
    defaults = {}
    if order.place.local_size > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun: workers share the cores
    if is_loopback(order.master_addr):
        # Otherwise gloo takes the address of the host's name, which may lead nowhere.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    elif interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = defaults["NCCL_SOCKET_IFNAME"] = interface
    return defaults


def _torchrun_names(spec: JobSpec, order: StartWorkerOrder) -> dict[str, str]:
    place = order.place
    values = {
        "RANK": place.rank,
        "LOCAL_RANK": place.slot,  # names the device
        "WORLD_SIZE": place.size,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.node_count,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.size,
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": order.master_port,
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
    }
    return {name: str(value) for name, value in values.items()}
