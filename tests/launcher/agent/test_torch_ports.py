"""What torch listens at when ELASTIC_PORTS says where."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.environment import TORCH_PORTS
from launcher.agent.torch_ports._elastic_torch_ports import is_writable
from tests.support.ports import free_range

LISTENING = """
import os, socket
from pathlib import Path

def listening():
    own = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
           if os.path.islink(f"/proc/self/fd/{n}")}
    rows = [l.split() for f in ("tcp", "tcp6") for l in open(f"/proc/self/net/{f}")]
    return sorted(int(r[1].rpartition(":")[2], 16) for r in rows
                  if r[3] == "0A" and f"socket:[{r[9]}]" in own)
"""
GLOO = """
import torch.distributed as dist
create = dist.ProcessGroupGloo.create_device
devices = [create(hostname="127.0.0.1"), create(interface="lo")]
print(*listening())
"""


def python(
    code: str, tmp_path: Path, ports: tuple[int, int] | None, *flags: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{TORCH_PORTS}{os.pathsep}{tmp_path}", "RANK": "3"}
    if ports is not None:
        given = f"{ports[0]}-{ports[1]}"
        env |= {"ELASTIC_PORTS": f"{given}:{given}", "ELASTIC_HOSTNAME": "node1"}
    argv = [sys.executable, *flags, "-c", LISTENING + code]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_gloo_listens_within_the_range(tmp_path: Path) -> None:
    low, high = free_range(4)
    done = python(GLOO, tmp_path, (low, high))
    found = list(map(int, done.stdout.split()))
    assert len(set(found)) == 2, done.stderr
    assert all(low <= port <= high for port in found)


def test_a_range_without_a_free_port_is_named(tmp_path: Path) -> None:
    low, _ = free_range(1)
    done = python(GLOO, tmp_path, (low, low))
    assert done.returncode != 0
    said = f"elastic: no port of --ports {low}-{low} is free on node1 for gloo of rank 3"
    assert said in done.stderr
    assert "Address already in use" in done.stderr


def test_a_port_that_a_script_names_and_sockets_of_python_are_as_they_were(tmp_path: Path) -> None:
    (own, _), ports = free_range(1), free_range(2)
    code = f"""
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {own}, is_master=True, wait_for_workers=False)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(store.port, {ports[0]} <= server.getsockname()[1] <= {ports[1]})
"""
    done = python(code, tmp_path, ports)
    assert done.stdout.split() == [str(own), "False"], done.stderr


def test_many_processes_that_choose_at_once_get_ports_of_their_own(tmp_path: Path) -> None:
    low, high = free_range(8)
    code = """
import torch.distributed as dist
pids = []
for _ in range(8):
    if (pid := os.fork()) == 0:
        devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        os.write(1, b"%d\\n" % listening()[0])
        import time; time.sleep(2)
        os._exit(0)
    pids.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
"""
    done = python(code, tmp_path, (low, high))
    assert sorted(map(int, done.stdout.split())) == list(range(low, high + 1)), done.stderr


def test_the_real_sitecustomize_is_imported_with_and_without_the_variable(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    for ports in (None, (29400, 29463)):
        assert python("", tmp_path, ports).stdout == "mine\n"


@pytest.mark.parametrize("given", ["", "x-y:1-2", "0-5:0-5", "5-4:5-4"])
def test_a_variable_that_makes_no_sense_is_said_and_torch_works(given: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(TORCH_PORTS), "ELASTIC_PORTS": given}
    argv = [sys.executable, "-c", LISTENING + GLOO]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert len(done.stdout.split()) == 2
    assert "torch cannot be told to listen at the ports of --ports" in done.stderr


def test_memory_that_cannot_be_written_is_told_from_memory_that_can() -> None:
    """A library that was linked with `-z relro -z now` has its table in such memory."""
    buffer = ctypes.create_string_buffer(8)
    assert is_writable(ctypes.addressof(buffer))
    code = ctypes.cast(ctypes.CDLL(None).bind, ctypes.c_void_p).value
    assert code
    assert not is_writable(code)
    assert not is_writable(0)
