"""Asks squeue which nodes a Slurm allocation still has.

Slurm takes a node that failed out of a job that goes on without it (`--no-kill`) and does not give
it back; `scontrol update job` takes nodes away and adds others. When the allocation itself is over,
`salloc` does not tell the command that it has started: so this does. Asked rarely: slurmctld serves
the whole cluster.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from elastic_driver.runtime.discovery import DiscoveryError
from elastic_driver.runtime.host_lists import Hosts, parse_hosts

EVERY_S = 10.0  # between two questions
_ANSWER_S = 10.0
_LOOK_S = 0.1
_OVER = "CANCELLED COMPLETED COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
_UNKNOWN = "Invalid job id"  # it was over so long ago that Slurm has forgotten it


class AllocationDiscovery:
    """A `HostDiscovery`: the nodes of an allocation that squeue names.

    Args:
        job_id: the allocation.
        hosts: its nodes with their slots at the start; a node that comes later has as many
            slots as the first of them.
        environ: what squeue is run with.
        every: seconds between two questions.

    `on_over` is called with the reason, by whoever asks, once the allocation is over.
    """

    def __init__(
        self, job_id: str, hosts: Hosts, environ: Mapping[str, str], *, every: float = EVERY_S
    ) -> None:
        self._job_id, self._environ, self._every = job_id, dict(environ), every
        self._slots, self._hosts = dict(hosts), hosts
        self.on_over: Callable[[str], None] = lambda _reason: None
        self._over = False
        self._asked = time.monotonic()  # the variables that `hosts` is from are fresh
        self._cancelled = threading.Event()
        self._program = shutil.which("squeue", path=self._environ.get("PATH"))

    def find(self) -> Hosts:
        """Return the nodes; raises DiscoveryError if Slurm does not say."""
        if self._program is not None and time.monotonic() - self._asked >= self._every:
            self._asked = time.monotonic()
            state, nodes = self._ask()
            if state in _OVER.split():
                self._end(f"{state.lower().replace('_', ' ')}, says Slurm")
                return self._hosts
            named = [name for name, _ in parse_hosts(nodes, source="squeue")]
            usual = next(iter(self._slots.values()))
            self._hosts = tuple((name, self._slots.get(name, usual)) for name in named)
        return self._hosts

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        self._cancelled.set()

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            self.on_over(f"Slurm job {self._job_id} is over ({why})")

    def _ask(self) -> tuple[str, str]:
        """Return the allocation's state and its nodes."""
        argv = [str(self._program), "--noheader", f"--jobs={self._job_id}", "--states=all"]
        argv.append("--format=%T %N")
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environ,
            start_new_session=True,
        ) as squeue:
            deadline = time.monotonic() + _ANSWER_S
            while squeue.poll() is None:
                if self._cancelled.wait(_LOOK_S) or time.monotonic() > deadline:
                    squeue.kill()
            said, problem = squeue.communicate()
        state, _, nodes = said.strip().partition(" ")
        if _UNKNOWN in problem:
            return "COMPLETED", ""
        if squeue.returncode != 0 or not state:
            raise DiscoveryError(f"squeue does not say which nodes Slurm job {self._job_id} has")
        return state, nodes
