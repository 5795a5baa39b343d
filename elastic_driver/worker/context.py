"""What the launcher told this process at birth, read once from its environment.

`world` asks for it when a script calls `elastic.init()`. A process that was not started by
`elasticrun` has no such context and trains alone, as a world of one. A process that carries only
some of the variables was started wrongly, and is told so. The token itself is never here, only
the path of the file that holds it. Times are seconds. torch is never imported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.documents import SlotInfo
from elastic_driver.errors import UsageError

LOCAL_RANK = "LOCAL_RANK"  # torchrun's name; at birth it is the slot, and the slot never changes
DEFAULT_HEARTBEAT_TIMEOUT_S = 30.0
N = TypeVar("N", int, float)
_NEEDED = (contract.WORKER_ID, contract.RENDEZVOUS, contract.TOKEN_FILE)


class WorkerContext(Struct, frozen=True, kw_only=True):
    """The identity of this process and where it finds the rendezvous."""

    run_id: str
    worker: str  # `<host>.<slot>.<incarnation>`
    host: str
    slot: int
    endpoint: str  # http://host:port
    token_file: str
    heartbeat_timeout: float
    hang_timeout: float | None = None  # None: adapts to the step time; 0: off
    leave_notice: float = 0.0  # from a signal to the end of this process; 0: at once
    scratch: str | None = None  # a folder that the agent removes when it ends


def from_environment(environ: Mapping[str, str] | None = None) -> WorkerContext | None:
    """This worker's context, or None for a process that `elasticrun` did not start.

    Raises `UsageError` where some of the variables are there and others are missing or wrong,
    and where another launcher has started several processes, which would not find each other.
    """
    env = os.environ if environ is None else environ
    present = [name for name in _NEEDED if env.get(name)]
    if not present:
        if _number(env, "WORLD_SIZE", 1, int) > 1:
            raise UsageError(
                "WORLD_SIZE says that this process is one of several, but it was not started by "
                "elasticrun; start the script with `elasticrun -np N script.py`"
            )
        return None
    missing = [name for name in _NEEDED if name not in present]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} missing from the environment though {present[0]} is set; "
            "start the script with `elasticrun script.py`, or unset every ELASTIC_* variable "
            "to train in this process alone"
        )
    worker = env[contract.WORKER_ID]
    endpoint = env[contract.RENDEZVOUS]
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise UsageError(
            f"{contract.RENDEZVOUS} is {endpoint!r}, not http://HOST:PORT; "
            "start the script with `elasticrun script.py`"
        )
    return WorkerContext(
        run_id=env.get(contract.RUN_ID, ""),
        worker=worker,
        host=env.get(contract.HOSTNAME) or worker.rsplit(".", 2)[0],
        slot=_number(env, LOCAL_RANK, 0, int),
        endpoint=endpoint,
        token_file=env[contract.TOKEN_FILE],
        heartbeat_timeout=_number(
            env, contract.HEARTBEAT_TIMEOUT, DEFAULT_HEARTBEAT_TIMEOUT_S, float
        ),
        hang_timeout=(
            _number(env, contract.HANG_TIMEOUT, 0.0, float)
            if env.get(contract.HANG_TIMEOUT)
            else None
        ),
        leave_notice=_number(env, contract.LEAVE_NOTICE, 0.0, float),
        scratch=env.get(contract.SCRATCH),
    )


def alone(host: str = "localhost", slot: int = 0) -> SlotInfo:
    """The place of a process that trains by itself: rank 0 of 1."""
    return SlotInfo(
        host=host,
        slot=slot,
        rank=0,
        local_rank=0,
        cross_rank=0,
        size=1,
        local_size=1,
        cross_size=1,
        node_rank=0,
        node_count=1,
    )


def address_towards(endpoint: str) -> str | None:
    """Return this host's address on the way to `http://host:port`; sends nothing."""
    parts = urlsplit(endpoint)
    if not parts.hostname or not parts.port:
        return None
    family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port))
        return str(probe.getsockname()[0])
    return None


def _number(env: Mapping[str, str], name: str, default: N, kind: Callable[[str], N]) -> N:
    text = env.get(name)
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = kind("-1")
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} is {text!r}; it must be a number that is not negative")
    return value


def use_scratch(folder: str) -> None:
    """Let `multiprocessing` keep its sockets in `folder`, unless it has a folder already.

    A killed worker cannot remove the folder that Python would make; the agent removes this one.
    There is no official setting, so nothing happens where Python's own field has changed.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault("tempdir", folder)
