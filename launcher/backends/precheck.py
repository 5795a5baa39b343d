"""Asks hosts, before the job starts, whether an agent can run there.

`launcher.backends.remote` calls it with hosts that are reached through another program. Each is
asked once, many at a time, with a deadline. A host is fit if it has our Python, our package in the
same version, and the job's folder. Nothing is left on the hosts.
"""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from elastic_driver.errors import ClusterError
from launcher import version
from launcher.agent.remote import LOOKED
from launcher.backends.remote_shell import RemoteShell

AT_ONCE = 32
LOOK_S = 20.0  # beyond the time to connect: Python has to be loaded from a slow disk


class Found(msgspec.Struct, frozen=True):
    """A host's answer (`launcher.agent.remote.look`)."""

    version: str
    python: str
    folder: bool  # the job's working directory is there
    temporary: bool  # its folder for temporary files can be written


def precheck(hosts: Sequence[str], shell: RemoteShell, cwd: str) -> dict[str, str]:
    """Return host → why for the hosts that are not fit, in the order given."""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = pool.map(lambda host: _look(host, shell, cwd), hosts)
        return {host: problem for host, problem in zip(hosts, problems, strict=True) if problem}


def judge(host: str, found: Found, cwd: str, ours: str) -> str | None:
    """Return what is wrong with a host that has answered; None if nothing is."""
    if found.version != ours:
        return f"{host}: elastic-driver {found.version} is installed there, and {ours} here"
    if not found.folder:
        return f"{host}: the folder {cwd} does not exist there; start the job from one that does"
    if not found.temporary:
        return f"{host}: its folder for temporary files cannot be written; is the disk full?"
    return None


def _look(host: str, shell: RemoteShell, cwd: str) -> str | None:
    patience = shell.connect_timeout + LOOK_S
    try:
        done = subprocess.run(
            shell.argv(host, "look", cwd),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
            env=shell.environ(),
            start_new_session=True,  # Ctrl-C in our terminal is for us alone
        )
    except ClusterError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{host}: no answer within {patience:.0f} s; is it overloaded, or its disk gone?"
    except OSError as error:
        return f"{host}: cannot run {shell.program}: {error.strerror}"
    mark = f"{LOOKED} ".encode()
    lines = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    if done.returncode != 0 or not lines:
        return shell.explain(host, done.returncode, done.stderr.decode(errors="replace"))
    try:
        found = msgspec.json.decode(lines[-1][len(mark) :], type=Found)
    except msgspec.DecodeError as error:
        return f"{host}: its answer makes no sense ({error}); is elastic-driver the same there?"
    return judge(host, found, cwd, version())
