"""The nodes of a Slurm cluster, as `sinfo` lists them."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from elastic_driver.brain.monitoring import MonitorOptions
from elastic_driver.brain.store.records import Node
from elastic_driver.errors import UsageError

TIMEOUT_S = 10.0
MOST = 2.0**40  # a load, or MiB
# Name, processors (allocated/idle/other/all), load, free and all memory in MiB, state.
_FORMAT = "%N|%C|%O|%e|%m|%T"
_USABLE = ("idle", "mixed", "allocated", "completing")
_MIB = 1 << 20


class Slurm:
    """Asks Slurm's controller; nodes that take no jobs are left out."""

    def __init__(self, options: MonitorOptions) -> None:
        found = shutil.which("sinfo")
        if found is None:
            raise UsageError("--source slurm needs sinfo, which is not on the PATH; install it")
        self._sinfo, self._options = found, options

    def look(self, now: float) -> Sequence[Node]:
        """See `Monitor.look`."""
        command = [self._sinfo, "--noheader", "--Node", f"--format={_FORMAT}"]
        try:
            done = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"sinfo took longer than {TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["no message"]
            raise OSError(f"sinfo failed: {said[-1]}")
        named = dict(self._options.hosts)
        nodes = read(done.stdout, self._options, now)
        return [node for node in nodes if not named or node.name in named]


def read(text: str, options: MonitorOptions, now: float) -> list[Node]:
    """Return the usable nodes in sinfo's lines, each once; raises ValueError for other lines."""
    found: dict[str, Node] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6 or fields[1].count("/") != 3:
            raise ValueError(f"sinfo printed {line[:80]!r}")
        name, cpus, load, free, memory, state = fields
        if state.strip("*~#$@^-+!%").lower() not in _USABLE or state.endswith("*"):
            continue  # down, drained, reserved, or not responding ("*")
        _allocated, idle, _other, total = map(int, cpus.split("/"))
        slots = options.slots_of(name, total)
        known = _number(load)
        found[name] = Node(
            name=name,
            seen=now,
            slots=slots,
            idle=None if slots is None or not total else slots * idle // total,
            cpu=None if known is None or not total else min(1.0, known / total),
            memory_free=_mib(free),
            memory_total=_mib(memory),
        )
    return list(found.values())


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None  # "N/A": the node has not said it yet
    return found if 0 <= found < MOST else None


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number * _MIB)
