"""What a node that joins calls itself, and which of several processes here is to serve.

The first node of a machine has the machine's name, a second one at the same server `name-2`. A
name is held through an abstract socket, which the kernel frees when the process ends, however it
ends: so whoever holds the name now follows the process that held it before, and keeps its name.
"""

from __future__ import annotations

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
    """This machine's name, fit for a host's."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:150].lstrip("._-")
    return name or _NO_NAME


def machine_id() -> str:
    """What tells this machine from another one of the same name (machine-id(5))."""
    for path in (_MACHINE_ID, _BOOT_ID):
        with contextlib.suppress(OSError):
            if text := path.read_text(errors="replace").strip():
                return text[:64]
    return own_name()[:64]


@contextlib.contextmanager
def claim_port(port: int) -> Iterator[bool]:
    """Whether we are the one process of this machine that is to serve at this port.

    Asked before anything is opened or written: of two that begin together, both find it free.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        try:
            held.bind(f"\0elastic-serve/{port}")
        except OSError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def claim_name(place: str) -> Iterator[str]:
    """A name that no other live node of this user and machine has at the server `place`."""
    base = own_name()
    at = hashlib.sha256(place.encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        for number in range(1, _MOST + 1):
            try:
                held.bind(f"\0elastic-join/{os.geteuid()}/{at}/{number}")
            except OSError:  # taken, by a node that lives
                continue
            yield base if number == 1 else f"{base}-{number}"
            return
    raise OSError(f"{_MOST} nodes of this machine have joined {place} already")
