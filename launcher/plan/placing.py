"""Where a job runs and what starts its agents: which of the options, or Slurm, says so. Pure.

`launch` calls it with the options' values and this machine's facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_driver.errors import UsageError
from elastic_driver.runtime.host_lists import Hosts
from launcher import options as o
from launcher.backends.mpi_ranks import started_ranks
from launcher.backends.slurm_allocation import Allocation, read_allocation
from launcher.commandline.values import Values
from launcher.options import Option

HOST_OPTIONS: tuple[Option[Any], ...] = (
    o.STANDALONE,
    o.HOST_DISCOVERY_SCRIPT,
    o.HOSTS_LIST,
    o.HOSTFILE,
)


def choose_host_option(values: Values) -> Option[Any] | None:
    """The one option that says where to run, the highest level's; None: nobody says anything.

    Raises UsageError where two of one level contradict each other.
    """
    named = sorted((x for x in HOST_OPTIONS if values[x]), key=values.level, reverse=True)
    if len(named) > 1 and values.level(named[0]) == values.level(named[1]):
        raise UsageError(
            f"{named[0].long} and {named[1].long} both say where to run; keep one of them"
        )
    return named[0] if named else None


def choose_allocation(values: Values, environ: Mapping[str, str]) -> Allocation | None:
    """The Slurm allocation that the agents are to be started in; None: none.

    It is ours where --backend slurm says so, and with --backend auto where nothing else says
    where to run. Raises UsageError where there is none, or where we were started many times.
    """
    wanted = values[o.BACKEND]
    silent = choose_host_option(values) is None and not _meets_elsewhere(values)
    if wanted not in ("auto", "slurm") or (wanted == "auto" and not silent):
        return None
    allocation = read_allocation(environ)
    if allocation is None:
        if wanted == "slurm":
            raise UsageError(
                "--backend slurm works inside an allocation only: start it with sbatch or salloc"
            )
        return None
    if allocation.step_tasks > 1:
        raise UsageError(
            f"srun has started elasticrun {allocation.step_tasks} times; start it once, from the "
            "batch script: it starts its own agents on the nodes"
        )
    return allocation


def check_nodes(allocation: Allocation, hosts: Hosts, source: str) -> None:
    """Raise UsageError where a host that was named is no node of the allocation."""
    for host, _ in hosts:
        if host not in allocation.nodes:
            raise UsageError(
                f"{host} ({source}) is not in {allocation.source}, whose nodes are "
                f"{', '.join(allocation.nodes[:8])}{', …' if len(allocation.nodes) > 8 else ''}"
            )


def check_alone(values: Values, environ: Mapping[str, str]) -> None:
    """Raise UsageError where mpirun has started many of us, each of which would be a job."""
    ranks = started_ranks(environ)
    if ranks > 1 and values[o.BACKEND] != "mpi" and not _meets_elsewhere(values):
        raise UsageError(
            f"mpirun has started elasticrun {ranks} times, which would be as many jobs; say "
            "--backend mpi for one job of all ranks, or start it once"
        )


def _meets_elsewhere(values: Values) -> bool:
    """Whether the same command on several nodes is meant, as with torchrun."""
    return bool(values.level(o.NNODES) and values.level(o.RDZV_ENDPOINT))
