"""What the trial counts of a process."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from tests.chaos.watch import Size

ITSELF = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
print("connected", flush=True)
input()
"""


@pytest.mark.parametrize("inside", ["{0}", "unshare -Urn sh -c 'ip link set lo up; exec {0}'"])
def test_open_connections_are_no_descriptors(inside: str, tmp_path: Path) -> None:
    script = tmp_path / "connected.py"
    script.write_text(ITSELF)
    argv = shlex.split(inside.format(f"{sys.executable} {script}"))
    with subprocess.Popen(argv, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        size = Size.of(psutil.Process(process.pid))
        process.communicate("\n", timeout=10)
    assert size.connections == 2
    assert size.descriptors == 4, "three streams and the listener"
