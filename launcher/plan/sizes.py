"""The number of workers a job starts with, needs and may have.

Pure. `launch` calls it. The rules are horovodrun's (-np, --min-np, --max-np) and torchrun's
(--nnodes, --nproc-per-node) where those two say anything:

* -np N: the first round waits for N. Once trained, the job goes on with what is left, down to
  --min-np (default 1). With --min-np M, M also suffice when --start-timeout is over.
* Without -np: all slots of a fixed list, at most --max-np; with a discovery script --min-np.
* The most: --max-np, else N for a fixed list, else no limit.
"""

from itertools import pairwise

from msgspec import Struct

from elastic_driver.core.rules import units
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.settings import Settings
from launcher.options import table as o
from launcher.options.values import OptionValues


class MachineFacts(Struct, frozen=True):
    """The processors of a machine, for `--nproc-per-node auto`."""

    cpus: int
    gpus: int


class JobSize(Struct, frozen=True):
    """The sizes of `elastic_driver.settings.Settings`, and a remark for the user."""

    start_np: int
    min_np: int
    max_np: int | None
    start_min_np: int | None
    note: str = ""


class Wish(Struct, frozen=True):
    """The sizes asked for: -np, --min-np, --max-np, or the same from --nnodes."""

    asked: int | None
    least: int | None
    most: int | None


def slots_of_a_host(values: OptionValues, machine: MachineFacts) -> int | None:
    """Return the slots of a host listed without a number; None if nobody said.

    Raises UsageError for `--nproc-per-node gpu` if there is none.
    """
    workers = values[o.NPROC_PER_NODE]
    if workers is None:
        return values[o.SLOTS_PER_HOST]
    if values[o.SLOTS_PER_HOST] not in (None, workers):
        raise UsageError("--slots-per-host and --nproc-per-node say the same; keep one of them")
    if workers == "gpu" and not machine.gpus:
        raise UsageError(
            "--nproc-per-node gpu: this machine has no NVIDIA GPU that is visible; "
            "say cpu, auto or a number, or check CUDA_VISIBLE_DEVICES"
        )
    if isinstance(workers, int):
        return workers
    return machine.cpus if workers == "cpu" else machine.gpus or machine.cpus


def read_wish(values: OptionValues, slots: int | None) -> Wish:
    """Return the sizes asked for; raises UsageError if they contradict each other."""
    nodes = values[o.NNODES]
    given = max((o.NUM_PROC, o.MIN_NP, o.MAX_NP), key=values.level)
    if nodes is not None and values.level(o.NNODES) == values.level(given):
        raise UsageError(
            f"--nnodes and {given.long} both set the size of the job; "
            "use -np, --min-np, --max-np or --nnodes with --nproc-per-node"
        )
    if nodes is not None and values.level(o.NNODES) > values.level(given):
        return Wish(None, nodes[0] * (slots or 1), nodes[1] * (slots or 1))
    wish = Wish(values[o.NUM_PROC], values[o.MIN_NP], values[o.MAX_NP])
    named = ((o.MIN_NP, wish.least), (o.NUM_PROC, wish.asked), (o.MAX_NP, wish.most))
    known = [(option.long, number) for option, number in named if number is not None]
    for (low_name, low), (high_name, high) in pairwise(known):
        if low > high:
            raise UsageError(f"{low_name} {low} is more than {high_name} {high}")
    return wish


def bounds_of_hosts(values: OptionValues) -> tuple[int, int | None]:
    """Return the fewest and the most hosts of a world (None: any number).

    Raises UsageError if no number of hosts fits --nnodes and --node-unit.
    """
    nodes, unit = values[o.NNODES], values[o.NODE_UNIT]
    others = max(map(values.level, (o.NUM_PROC, o.MIN_NP, o.MAX_NP)))
    if nodes is None or values.level(o.NNODES) < others:
        return 1, None
    least = -(-nodes[0] // unit) * unit
    if least > nodes[1]:
        raise UsageError(
            f"--node-unit {unit}: no multiple of it lies between {nodes[0]} and {nodes[1]} hosts "
            "(--nnodes); change one of them"
        )
    return nodes


def enough_hosts(settings: Settings, hosts: int, described: str) -> None:
    """Raise ClusterError if a fixed list can never have the hosts that a world needs."""
    needed = units.width(settings)
    if hosts < needed:
        raise ClusterError(
            f"need {needed} hosts (--nnodes, --node-unit), but there are {hosts} ({described}); "
            "name more of them, or let nodes join with --rdzv-endpoint or --serve "
            "(docs/joining.md)"
        )


def decide_size(wish: Wish, capacity: int | None, hosts: str) -> JobSize:
    """Return the sizes of the job.

    Args:
        wish: what was asked for.
        capacity: slots of a fixed list of hosts; None when hosts are discovered.
        hosts: the fixed list in words, for the message.

    Raises:
        ClusterError: a fixed list can never have the workers needed (exit 75).
    """
    least = wish.least or 1
    if capacity is None:
        start = wish.asked or least
        return JobSize(start, least, wish.most, wish.least)
    start = wish.asked or max(min(capacity, wish.most or capacity), least)
    needed = wish.least or start
    if capacity < needed:
        raise ClusterError(
            f"need {needed} slots, but there are {capacity} ({hosts}); name more hosts or slots "
            "with -H, --hostfile or --slots-per-host, or lower -np or --min-np"
        )
    most = wish.most or wish.asked
    if start <= capacity:
        return JobSize(start, least, most, wish.least)
    note = f"starting with {capacity} workers instead of {start}: {hosts} has no more slots"
    return JobSize(capacity, least, most, wish.least, note)
