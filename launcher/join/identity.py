"""The name of a node that joins, and the choice of the one process here that serves.

The first node of a machine has the machine's name, a second one at the same server `name-2`. A
process holds a name through an abstract socket, which the kernel frees however the process ends. So
the next process that holds the name follows the one before it, and keeps its name.
"""

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_MACHINE_ID, _BOOT_ID = Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")
_MOST = 1000  # nodes of one machine at one server
_NO_NAME = "node"


def own_name() -> str:
    """Return this machine's name, made fit for a host name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:150].lstrip("._-")
    return name or _NO_NAME


def machine_id() -> str:
    """Return an id that tells machines of the same name apart (machine-id(5))."""
    for path in (_MACHINE_ID, _BOOT_ID):
        with contextlib.suppress(OSError):
            if text := path.read_text(errors="replace").strip():
                return text[:64]
    return own_name()[:64]


@contextlib.contextmanager
def claim_port(port: int) -> Iterator[bool]:
    """Yield whether we are the one process of this machine that is to serve at this port.

    Asked before anything is opened or written: of two that begin together, both find it free.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        yield _bind(held, f"elastic-serve/{port}")


@contextlib.contextmanager
def claim_name(place: str) -> Iterator[str]:
    """Yield a name that no other live node of this user and machine has at the server `place`."""
    base = own_name()
    at = hashlib.sha256(place.encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        for number in range(1, _MOST + 1):
            if _bind(held, f"elastic-join/{os.geteuid()}/{at}/{number}"):
                yield base if number == 1 else f"{base}-{number}"
                return
    raise OSError(f"{_MOST} nodes of this machine have joined {place} already")


def _bind(held: socket.socket, name: str) -> bool:
    """Hold an abstract name; return False if another live process holds it."""
    with contextlib.suppress(OSError):
        held.bind(f"\0{name}")
        return True
    return False
