"""Asks squeue which nodes a Slurm allocation still has.

Slurm takes a node that failed out of a job that goes on without it (`--no-kill`) and does not give
it back; `scontrol update job` takes nodes away and adds others. `salloc` does not tell the command
that it has started that the allocation is over; squeue does. It is asked rarely, because slurmctld
serves the whole cluster.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic_driver.runtime.discovery import MAX_TEXT_BYTES, DiscoveryError
from elastic_driver.runtime.host_lists import Hosts, parse_hosts
from elastic_driver.runtime.probe import ProbeCancelledError, ProbeError, ScriptProbe

EVERY_S = 10.0  # between two questions
_ANSWER_S = 10.0
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

    `find` calls `on_over` once with the reason when the allocation is over.
    """

    def __init__(
        self, job_id: str, hosts: Hosts, environ: Mapping[str, str], *, every: float = EVERY_S
    ) -> None:
        self._job_id, self._every = job_id, every
        self._slots, self._hosts = dict(hosts), hosts
        self.on_over: Callable[[str], None] = lambda _reason: None
        self._over = False
        self._asked = time.monotonic()  # the variables that `hosts` is from are fresh
        self._program = shutil.which("squeue", path=environ.get("PATH"))
        self._squeue = ScriptProbe(
            Path(self._program or "squeue"),
            *("--noheader", f"--jobs={job_id}", "--states=all", "--format=%T %N"),
            timeout=_ANSWER_S,
            max_output=MAX_TEXT_BYTES,
            env=environ,
        )

    def find(self) -> Hosts:
        """Return the nodes; raises DiscoveryError if Slurm does not say."""
        if self._program is not None and time.monotonic() - self._asked >= self._every:
            self._asked = time.monotonic()
            state, nodes = self._ask()
            if state in _OVER.split():
                if not self._over:
                    self._over = True
                    why = f"{state.lower().replace('_', ' ')}, says Slurm"
                    self.on_over(f"Slurm job {self._job_id} is over ({why})")
                return self._hosts
            named = [name for name, _ in parse_hosts(nodes, source="squeue")]
            usual = next(iter(self._slots.values()))
            self._hosts = tuple((name, self._slots.get(name, usual)) for name in named)
        return self._hosts

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        self._squeue.cancel()

    def _ask(self) -> tuple[str, str]:
        """Return the allocation's state and its nodes."""
        problem = ""
        try:
            state, _, nodes = self._squeue.run().decode(errors="replace").strip().partition(" ")
        except (ProbeError, ProbeCancelledError) as error:
            state, problem = "", str(error)
        if _UNKNOWN in problem:
            return "COMPLETED", ""
        if not state:
            raise DiscoveryError(f"squeue does not say which nodes Slurm job {self._job_id} has")
        return state, nodes
