"""Names of nodes: one for each that lives, and the same again for one that comes back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.join.driver_search import FOLDER, claim_name, claim_port
from launcher.network import own_name

PORT = 70001
HOLDS = f"""
import os, sys
from launcher.join.driver_search import claim_port
with claim_port({PORT}, os.environ, print) as ours:
    print(ours, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def test_nodes_of_one_machine_have_different_names_and_free_them(environ: dict[str, str]) -> None:
    said: list[str] = []

    def claim(*places: str) -> str:
        return stack.enter_context(claim_name(places, environ, said.append))

    with ExitStack() as stack:
        assert claim("here:1") == own_name()
        assert claim("here:1", "run") == f"{own_name()}-2"
        assert claim("elsewhere:1") == own_name()
        assert claim("elsewhere:1", "run") == f"{own_name()}-3"  # 1 is of this place, 2 of this run
    with ExitStack() as stack:
        assert claim("here:1", "run") == own_name()
    assert said == []
    assert list((Path(environ["XDG_STATE_HOME"]) / "elastic-driver" / FOLDER).iterdir()) == []


def test_one_process_at_a_time_serves_at_a_port_until_it_is_killed(
    environ: dict[str, str],
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with (
            claim_port(PORT, environ, pytest.fail) as ours,
            claim_port(PORT + 1, environ, pytest.fail) as other,
        ):
            assert (ours, other) == (False, True)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    with claim_port(PORT, environ, pytest.fail) as again:
        assert again


def test_names_that_another_user_has_taken_of_the_kernel_mean_nothing(
    environ: dict[str, str],
) -> None:
    """What an earlier version asked: any user of the machine may have these names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(f"\0elastic-serve/{PORT}")
        with claim_port(PORT, environ, pytest.fail) as ours:
            assert ours


@pytest.mark.parametrize("what", ["link", "open to others", "file", "not ours"])
def test_a_folder_that_is_not_only_ours_is_told_and_keeps_nothing_from_going_on(
    what: str, environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "elastic-driver" / FOLDER
    folder.parent.mkdir()
    if what == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif what == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    if what == "not ours":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    said: list[str] = []
    with (
        claim_port(PORT, environ, said.append) as ours,
        claim_name(("here:1",), environ, said.append) as name,
    ):
        assert (ours, name) == (True, own_name())
    assert [line.partition(": ")[0] for line in said] == [f"no names can be kept in {folder}"] * 2
    assert not list((tmp_path / "elsewhere").glob("*"))
