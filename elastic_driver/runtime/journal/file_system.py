"""The kind of file system that holds a journal: one on a network may hang as long as its server."""

import contextlib
import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OF_A_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.")


def network_file_system(folder: Path) -> str:
    """Return the kind (`nfs4`) if this folder is on another machine; "" otherwise, or unknown."""
    with contextlib.suppress(OSError):
        kind = file_system(os.stat(folder).st_dev, _MOUNTS.read_text())
        return kind if kind.startswith(_OF_A_NETWORK) else ""
    return ""


def file_system(device: int, mounts: str) -> str:
    """Return the kind of the file system with this device number; proc(5), mountinfo."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        if place.split()[2:3] == [number]:
            return source.split(" ", 1)[0]
    return ""
