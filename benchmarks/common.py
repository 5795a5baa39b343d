"""Shared by all benchmarks: medians with spread, ratios, the table, the JSON file, the machine.

Absolute times on a shared machine say little, so each benchmark runs its systems in turns: each
turn measures all of them, one after the other. A ratio is taken within each turn, of the medians in
it; the table has the median of the ratios, and the smallest and the largest. Every system is
compared with ours, always in the direction "times ours". A figure names one event or quantity, the
same for all systems that have it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

OURS = "elasticrun"
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Figure:
    """Samples of one figure for one system; `unit` is the unit of the numbers."""

    system: str
    figure: str
    unit: str
    samples: tuple[float, ...]
    note: str = ""
    turns: tuple[int, ...] = ()  # the turn of each sample; (): each is a turn of its own

    def by_turn(self) -> dict[int, float]:
        """Return the median of each turn."""
        found: dict[int, list[float]] = {}
        for turn, sample in zip(self.turns or range(len(self.samples)), self.samples, strict=True):
            found.setdefault(turn, []).append(sample)
        return {turn: statistics.median(samples) for turn, samples in found.items()}

    def ratios(self, ours: Figure) -> list[float]:
        """Return this figure as a multiple of ours, within each turn that has both."""
        mine, others = self.by_turn(), ours.by_turn()
        return [mine[turn] / others[turn] for turn in mine if others.get(turn)]


def gather(samples: Iterable[tuple[str, str, int, float]], unit: str = "s") -> list[Figure]:
    """Return the figures of (system, figure, turn, sample), in the order of their first samples."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for system, figure, turn, sample in samples:
        found.setdefault((figure, system), []).append((turn, sample))
    return [
        Figure(system, figure, unit, tuple(s for _, s in pairs), turns=tuple(t for t, _ in pairs))
        for (figure, system), pairs in found.items()
    ]


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def report(name: str, figures: Sequence[Figure]) -> None:
    """Print the table of one benchmark and write `results/<name>.json`.

    Systems whose names begin with `OURS` are ours; the others are compared with the first of these
    that has the same figure.
    """
    print(f"\n{name} (load {os.getloadavg()[0]:.1f})")
    ours: dict[str, Figure] = {}
    for figure in figures:
        if figure.system.startswith(OURS) and figure.samples:
            ours.setdefault(figure.figure, figure)
    wide = max(len(f.system) for f in figures)
    long = max(len(f.figure) for f in figures)
    for figure in figures:
        if not figure.samples:
            print(f"  {figure.figure:<{long}}  {figure.system:<{wide}}  no sample: {figure.note}")
            continue
        line = f"  {figure.figure:<{long}}  {figure.system:<{wide}}  {_spread(figure.samples)}"
        line += f" {figure.unit}  n={len(figure.samples)}"
        reference = ours.get(figure.figure, figure)
        if reference is not figure and (ratios := figure.ratios(reference)):
            line += f"  {_spread(ratios)} × ours, turns={len(ratios)}"
        print(line + (f"  ({figure.note})" if figure.note else ""))
    RESULTS.mkdir(exist_ok=True)
    document = {"machine": machine(), "figures": [asdict(f) for f in figures]}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.flush()


def _spread(samples: Sequence[float]) -> str:
    """Return the median, the smallest and the largest with three significant digits."""
    low, middle, high = (
        f"{x:.3g}" for x in (min(samples), statistics.median(samples), max(samples))
    )
    return f"{middle} ({low} … {high})"
