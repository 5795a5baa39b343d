"""What shows that agents of a run may live, beside its journal, which may be damaged or gone.

The agents of this machine are processes with the mark of the run. The event log says which hosts
had an agent. The lock says whether a driver that did not release it had begun the job.
"""

import contextlib
import os
import shlex
from pathlib import Path

import psutil

from elastic_driver import contract
from elastic_driver.job.job import Job
from elastic_driver.runtime.results import agents_started
from elastic_driver.runtime.run_dir import RunDir
from launcher.agent.processes import is_of_this_user
from launcher.backends.local import AGENT
from launcher.network import is_this_machine

_MODULE = [word.encode() for word in AGENT[1:]]


def agents_here(run_dir: RunDir) -> list[int]:
    """Return the pids of the run's agents that live on this machine."""
    mark = os.fsencode(f"{contract.JOB_MARK}={run_dir.token_file}")
    module = b"\0".join(_MODULE)
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended, or is another user's
            process = Path(f"/proc/{pid}")
            if module not in (process / "cmdline").read_bytes():  # most processes end here
                continue
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked and is_of_this_user(psutil.Process(pid)):
                found.append(pid)
    return found


def may_live(run_dir: RunDir) -> bool:
    """Return whether something says that agents of the run were started, and nothing its end."""
    former = run_dir.lock.former or run_dir.lock.holder
    began = former is not None and former.began
    return began or bool(agents_started(run_dir.events_file)) or bool(agents_here(run_dir))


def nobody_lives(run_dir: RunDir) -> bool:
    """Return whether the run has had agents, all of them on this machine, and none is left."""
    hosts = agents_started(run_dir.events_file)
    return bool(hosts) and all(map(is_this_machine, hosts)) and not agents_here(run_dir)


def unknown_agents(run_dir: RunDir, job: Job) -> list[str]:
    """Return the hosts with agents, if the job knows of none of them: its journal was cut off."""
    hosts = agents_started(run_dir.events_file)
    return [] if any(map(job.fleet.has_had, hosts)) else sorted(hosts)


def how_to_end(run_dir: RunDir) -> str:
    """Return what to type, so that the same command may begin the run anew."""
    here = " ".join(map(str, agents_here(run_dir)))
    folder = str(run_dir.path)
    first = f"end its agents (kill {here})" if here else "wait until its agents have ended"
    if not run_dir.path.exists():
        return first
    return f"{first}, put its files away ({shlex.join(('mv', folder, f'{folder}.damaged'))})"
