"""Which processors each worker of a host may use, by the host's topology (`--bind`).

`numa`: all processors of one NUMA node, that of the worker's GPU where the system tells it. `core`:
cores of its own there, all of a core's hardware threads together. Only processors count that this
process may use itself, so what a cgroup, Slurm or taskset has left out stays left out. The choice
depends on slots, not on ranks: a slot keeps its processors from one round to the next.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.contract import VISIBLE_DEVICES

SYS = Path("/sys")
PROC = Path("/proc")
_NVIDIA = "driver/nvidia/gpus"  # below /proc: a folder for each GPU, named by its PCI address


@dataclass(frozen=True, order=True)
class Core:
    """A core, and those of its hardware threads that may be used."""

    node: int  # of NUMA
    package: int
    cpus: tuple[int, ...]


def usable_cores(allowed: Collection[int] | None = None, sys: Path = SYS) -> list[Core]:
    """Return the cores that this process may use, those of a NUMA node together.

    `allowed`: the processors that count; None: those of this process.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = _nodes(sys)
    threads: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(allowed):
        topology = sys / f"devices/system/cpu/cpu{cpu}/topology"
        package = _number(topology / "physical_package_id", 0)
        core = _number(topology / "core_id", cpu)
        threads.setdefault((nodes.get(cpu, 0), package, core), []).append(cpu)
    return sorted(Core(node, package, tuple(c)) for (node, package, _), c in threads.items())


def gpu_nodes(env: Mapping[str, str], sys: Path = SYS, proc: Path = PROC) -> list[int | None]:
    """Return the NUMA node of each GPU that a worker with these variables sees; None: not known."""
    addresses = sorted(path.name.lower() for path in _listed(proc / _NVIDIA))
    addresses = addresses or sorted(p.name for p in _listed(sys / "bus/pci/drivers/amdgpu", ":"))
    nodes = [_number(sys / f"bus/pci/devices/{a}/numa_node", -1) for a in addresses]
    known = [node if node >= 0 else None for node in nodes]
    seen = next((env[name] for name in VISIBLE_DEVICES if name in env), None)
    if seen is None:
        return known
    words = [word.strip() for word in seen.split(",")]  # a UUID names no number: not known
    numbers = [int(word) if word.isdecimal() else len(known) for word in words]
    return [known[number] if number < len(known) else None for number in numbers]


def choose(
    bind: str, slot: int, slots: int, cores: Sequence[Core], nodes: Sequence[int | None] = ()
) -> frozenset[int]:
    """Return the processors of one of a host's slots.

    Args:
        bind: `numa` or `core`.
        slot: from 0.
        slots: of the host; more than it has cores share some.
        cores: those that may be used, at least one.
        nodes: the NUMA node of each slot's GPU; None: not known.
    """
    homes = [_home(s, max(slots, slot + 1), cores, nodes) for s in range(max(slots, slot + 1))]
    there = [core for core in cores if core.node == homes[slot]]
    if bind == "core":
        mates = [s for s, home in enumerate(homes) if home == homes[slot]]
        first = mates.index(slot) * len(there)
        count = len(mates)
        last = (mates.index(slot) + 1) * len(there)
        there = there[first // count : max(last // count, first // count + 1)]
    return frozenset(cpu for core in there for cpu in core.cpus)


def in_words(cpus: Iterable[int]) -> str:
    """Return processors as the kernel lists them: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def apply(pid: int, cpus: Collection[int]) -> None:
    """Bind every thread of a process, which starts no other meanwhile; OSError if that fails."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cpus)


def _home(slot: int, slots: int, cores: Sequence[Core], nodes: Sequence[int | None]) -> int:
    """Return the NUMA node of a slot: that of its GPU, or its part of all cores."""
    of_gpu = nodes[slot] if slot < len(nodes) else None
    if of_gpu is not None and any(core.node == of_gpu for core in cores):
        return of_gpu
    return cores[slot * len(cores) // slots].node


def _nodes(sys: Path) -> dict[int, int]:
    """Return the NUMA node of each processor; empty where there are none."""
    found: dict[int, int] = {}
    for node in _listed(sys / "devices/system/node", "node"):
        number = node.name.removeprefix("node")
        if number.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                text = (node / "cpulist").read_text().strip()
                found |= dict.fromkeys(_listed_numbers(text), int(number))
    return found


def _listed_numbers(text: str) -> Iterable[int]:
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def _listed(folder: Path, part: str = "") -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if part in path.name]
    return []


def _number(file: Path, otherwise: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return otherwise
