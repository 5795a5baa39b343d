"""Which machine this is, so that a driver notices two names of one machine.

Containers on one machine are machines of their own: they have another network, other processes,
another name or another disk. Copies of a virtual machine have another boot or another address.
"""

import hashlib
import ipaddress
import os
import socket
from pathlib import Path

from launcher.network import default_address

_BOOT_ID, _MACHINE_ID = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")
_SPACES = ("net", "pid", "uts")
_THIS = ("127.0.0.1", "::1")
_CHARS = 32


def machine_id(host: str) -> str:
    """Return what two names of one machine have in common; empty: that is not known.

    It is empty for the loopback addresses beside 127.0.0.1, too: they are names for hosts that
    share a machine on purpose.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass  # a name
    else:
        if address.is_loopback and host not in _THIS:
            return ""
    try:
        root = os.stat("/")
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _SPACES]
        facts = [_BOOT_ID.read_text(), socket.gethostname(), str(default_address())]
    except OSError:
        return ""
    if _MACHINE_ID.is_file():
        facts.append(_MACHINE_ID.read_text())
    facts += [*spaces, f"{root.st_dev}/{root.st_ino}"]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:_CHARS]
