"""The context of a worker: the variables that the agent put into its environment.

`elastic.init()` reads it. A process that `elasticrun` did not start has no context and trains
alone, as a world of one. Some variables without the others are an error. The context holds the path
of the token file, never the token; `client` reads it. Times are seconds. This module does not
import torch.
"""

import multiprocessing
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from elastic_driver import contract
from elastic_driver.errors import UsageError
from rendezvous.auth import read_credentials
from rendezvous.client import DEFAULT_TIMEOUT_S, RendezvousClient

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_NEEDED = (contract.WORKER_ID, contract.RENDEZVOUS, contract.TOKEN_FILE)


class WorkerContext(Struct, frozen=True, kw_only=True):
    """The identity of this worker, and the address of its rendezvous."""

    worker: str = field(name=contract.WORKER_ID)  # `<host>.<slot>.<incarnation>`
    # Torchrun's name; when a worker starts, its local rank is its slot.
    slot: Annotated[int, Meta(ge=0)] = field(name="LOCAL_RANK", default=0)
    endpoint: Annotated[str, Meta(pattern="^https?://[^/:]")] = field(name=contract.RENDEZVOUS)
    token_file: str = field(name=contract.TOKEN_FILE)
    heartbeat_timeout: Seconds = field(name=contract.HEARTBEAT_TIMEOUT, default=30.0)
    # None: adapts to the step time; 0: off.
    hang_timeout: Seconds | None = field(name=contract.HANG_TIMEOUT, default=None)
    # From a preemption signal to the end of this process; 0: at once.
    leave_notice: Seconds = field(name=contract.LEAVE_NOTICE, default=0.0)
    # A folder that the agent removes when it ends.
    scratch: str | None = field(name=contract.SCRATCH, default=None)
    # The agent writes the driver's present address there.
    driver_file: str | None = field(name=contract.DRIVER_FILE, default=None)
    # The wait for the next driver after one has died; 0: the workers end with their driver.
    driver_timeout: Seconds = field(name=contract.DRIVER_TIMEOUT, default=0.0)

    def client(self, timeout: float = DEFAULT_TIMEOUT_S) -> RendezvousClient:
        """Return a new client of the job's driver, wherever that is by now.

        `timeout` as for `RendezvousClient`. Raises `TokenError` if the token file cannot be used.
        """
        token, fingerprint = read_credentials(self.token_file)
        file = Path(self.driver_file) if self.driver_file else None
        return RendezvousClient(
            self.endpoint, token, timeout, url_file=file, fingerprint=fingerprint
        )


def from_environment(environ: Mapping[str, str] | None = None) -> WorkerContext | None:
    """Return this worker's context, or None for a process that `elasticrun` did not start.

    Raises `UsageError` where some of the variables are missing or wrong, and where another
    launcher has started several processes, which would not find each other.
    """
    env = {k: v for k, v in (os.environ if environ is None else environ).items() if v}
    missing = [name for name in _NEEDED if name not in env]
    if len(missing) == len(_NEEDED):
        if env.get("WORLD_SIZE", "1") not in ("0", "1"):
            raise UsageError(
                "WORLD_SIZE says that this process is one of several, but it was not started by "
                "elasticrun; start the script with `elasticrun -np N script.py`"
            )
        return None
    if missing:
        present = next(name for name in _NEEDED if name in env)
        raise UsageError(
            f"{', '.join(missing)} missing from the environment though {present} is set; "
            "start the script with `elasticrun script.py`, or unset every ELASTIC_* variable "
            "to train in this process alone"
        )
    try:
        return msgspec.convert(env, WorkerContext, strict=False)
    except msgspec.ValidationError as error:
        name = re.findall(r"\w+", str(error))[-1]  # "Expected `float` - at `$.NAME`"
        needed = "http://HOST:PORT" if name == contract.RENDEZVOUS else "a number from 0 up"
        message = f"{name} is {env[name]!r}, not {needed}; start the script with `elasticrun`"
        raise UsageError(message) from error


def use_scratch(folder: str) -> None:
    """Let `multiprocessing` keep its sockets in `folder`, unless it has a folder already.

    A killed worker cannot remove the folder that Python would make; the agent removes this one.
    There is no official setting, so nothing happens where Python's own field has changed.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault("tempdir", folder)
