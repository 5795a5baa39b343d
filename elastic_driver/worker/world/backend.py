"""The choice of the collectives of a round, from the script's wish and this machine's accelerator.

The type of device is torch's (`torch.accelerator`), and so is the library of its collectives: NCCL,
XCCL, or that of a plug-in. Gloo carries CPU tensors in any case.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_driver.contract import VISIBLE_DEVICES
from elastic_driver.errors import UsageError
from elastic_driver.worker.world import nccl
from elastic_driver.worker.world.device import Accelerator


@dataclass(frozen=True)
class BackendChoice:
    """The device half of this worker's groups; None: gloo carries everything.

    `by_vote`: the half exists only in rounds in which every worker votes with a device, because
    the script has not asked for it. `early`: open the device before there is a round, because it
    is hardly another worker's, too.
    """

    device: Accelerator | None = None
    by_vote: bool = False
    early: bool = False


def accelerator_names() -> tuple[str, str]:
    """Return torch's names of this installation's type of device and of its collectives.

    They are NCCL's if torch was built for no accelerator, and the second is "gloo" for a type that
    has none of its own. No device is touched.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return nccl.KIND, nccl.BACKEND
    try:
        return device.type, dist.get_default_backend_for_device(device)
    except ValueError:  # a plug-in without collectives
        return device.type, "gloo"


def choose_backend(backend: str | None, slot: int) -> BackendChoice:
    """Return the choice of the worker in this slot.

    `backend`: a name as torch's `init_process_group` takes it; None: not specified. Raises
    `UsageError` for an unknown name, and where it names a device's backend and there is no device.
    """
    kind, own = accelerator_names()
    names = set((backend or own).lower().replace(" ", "").split(","))
    if names in ({"gloo"}, {"cpu:gloo"}, {"cpu:gloo", f"{kind}:gloo"}):
        return BackendChoice()
    both = f"cpu:gloo,{kind}:{own}"
    if names not in ({own}, {f"{kind}:{own}"}, set(both.split(","))):
        raise UsageError(f"backend {backend!r} is not supported; use one of gloo, {own}, or {both}")
    built = dist.is_backend_available(own)
    index = device_of(slot, kind) if built else None
    if index is not None:
        device = nccl.Nccl(index) if own == nccl.BACKEND else Accelerator(kind, own, index)
        return BackendChoice(device, backend is None, early=backend is not None or index == slot)
    if backend is None:
        # Where torch has no such backend, no worker of the job has it, and no vote is needed.
        return BackendChoice(by_vote=built)
    if not built:
        name = own.upper()
        raise UsageError(f"backend {backend!r} needs a torch that is built with {name}; use gloo")
    visible = [f"{n}={os.environ[n]}" for n in VISIBLE_DEVICES if n in os.environ]
    seen = f" ({', '.join(visible)})" if visible else ""
    raise UsageError(
        f"backend {backend!r} needs a GPU for each worker, and slot {slot} has none{seen}; "
        "start no more workers on a host than it has GPUs, or use gloo"
    )


def device_of(slot: int, kind: str) -> int | None:
    """Return the visible device of the worker in this slot; None if it has none.

    If the launcher shows each worker one device only, or the script uses a device already, it is
    that one. Reads the number of devices from the driver and does not start a device.
    """
    module = torch.get_device_module(kind)
    if not module.is_available():
        return None
    if module.is_initialized():
        return int(module.current_device())
    devices = module.device_count()
    if slot < devices:
        return slot
    return 0 if devices == 1 else None
