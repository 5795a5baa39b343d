"""The first process of a cluster's node: makes it look like a machine of its own, then is sshd.

`tests.support.cluster` starts it inside fresh namespaces, as `python node.py '{…}'`; it imports
nothing of the project. Everything it mounts is private to the node and goes with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import socket
import sys
from pathlib import Path
from typing import Any

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """mount(2); raises OSError."""
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount {source} on {target}")


def main(node: dict[str, Any]) -> None:
    """Set the node up and become its sshd; `node` has name, shared, etc, pid_file, cgroups.

    `shared`: the folders below the machine's /tmp that all nodes see.
    """
    host_pid = os.readlink("/proc/self")  # /proc is still the one of the machine below
    for tasks in node["cgroups"]:
        Path(tasks).write_text("0")  # 0: the writer itself
    socket.sethostname(node["name"])
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/dev/shm", "tmpfs")
    mount("tmpfs", "/run", "tmpfs")
    os.makedirs("/run/sshd")
    for number, folder in enumerate(node["shared"]):
        os.mkdir(f"/run/shared{number}")
        mount(folder, f"/run/shared{number}", flags=_MS_BIND)
    mount("tmpfs", "/tmp", "tmpfs")
    os.chmod("/tmp", 0o1777)  # noqa: S103 - as every machine has it
    for number, folder in enumerate(node["shared"]):
        os.makedirs(folder)
        mount(f"/run/shared{number}", folder, flags=_MS_BIND)
    etc = Path(node["etc"])
    mount(str(etc / "hosts"), "/etc/hosts", flags=_MS_BIND)
    mount(str(etc / "resolv.conf"), os.path.realpath("/etc/resolv.conf"), flags=_MS_BIND)
    mount(str(etc / "ssh_config.d"), "/etc/ssh/ssh_config.d", flags=_MS_BIND)
    # What this user's shell does as it starts is no part of a test: a pyenv that is killed there
    # leaves a lock behind, for which every later shell waits for a minute.
    start_of_a_shell = Path(pwd.getpwuid(os.getuid()).pw_dir, ".bashrc")
    if start_of_a_shell.exists():
        mount(str(etc / "bashrc"), str(start_of_a_shell), flags=_MS_BIND)
    draft = Path(node["pid_file"] + ".new")
    draft.write_text(host_pid)
    draft.rename(node["pid_file"])
    sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", str(etc / "sshd_config")]
    os.execv(sshd[0], sshd)  # noqa: S606 - no shell is what is wanted


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
