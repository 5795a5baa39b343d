"""Which hosts an agent cannot be started on, and why, before anything is started.

`submit` calls it with the hosts that are reached through another program (ssh, srun, mpirun).
Each is asked once, many at a time, with a deadline; a host is fit when it has our Python, our
package in the same version, and the job's folder. Nothing is left on the hosts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from elastic_driver.errors import ClusterError
from launcher.agent.remote import LOOKED
from launcher.backends.remote_shell import Reach
from launcher.build_info import version

AT_ONCE = 32
LOOK_S = 20.0  # beyond the time to connect: Python has to be loaded from a slow disk


class Found(msgspec.Struct, frozen=True):
    """What a host says of itself (`launcher.agent.remote.look`)."""

    version: str
    python: str
    folder: bool  # the job's working directory is there
    temporary: bool  # its folder for temporary files can be written


def precheck(hosts: Sequence[str], reach: Reach, cwd: str) -> dict[str, str]:
    """The hosts that are not fit, each with a line that says why; in the order given."""

    def look(host: str) -> str | None:
        return _look(host, reach, cwd)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = pool.map(look, hosts)
        return {host: problem for host, problem in zip(hosts, problems, strict=True) if problem}


def judge(host: str, found: Found, cwd: str, ours: str) -> str | None:
    """What is wrong with a host that has answered; None: nothing."""
    if found.version != ours:
        return f"{host}: elastic-driver {found.version} is installed there, and {ours} here"
    if not found.folder:
        return f"{host}: the folder {cwd} does not exist there; start the job from one that does"
    if not found.temporary:
        return f"{host}: its folder for temporary files cannot be written; is the disk full?"
    return None


def _look(host: str, reach: Reach, cwd: str) -> str | None:
    patience = reach.connect_timeout + LOOK_S
    try:
        done = subprocess.run(
            reach.argv(host, "look", cwd),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
            env=reach.environ(),
            start_new_session=True,  # Ctrl-C in our terminal is for us alone
        )
    except ClusterError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{host}: no answer within {patience:.0f} s; is it overloaded, or its disk gone?"
    except OSError as error:
        return f"{host}: cannot run {reach.program}: {error.strerror}"
    mark = f"{LOOKED} ".encode()
    lines = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    if done.returncode != 0 or not lines:
        return reach.explain(host, done.returncode, done.stderr.decode(errors="replace"))
    try:
        found = msgspec.json.decode(lines[-1][len(mark) :], type=Found)
    except msgspec.DecodeError as error:
        return f"{host}: its answer makes no sense ({error}); is elastic-driver the same there?"
    return judge(host, found, cwd, version())
