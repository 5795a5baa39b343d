"""Shared by all benchmarks: medians with spread, the table, the JSON file, the machine's name.

Absolute times on a shared machine say little, so each benchmark runs its peers in turn, in the same
run, and prints ratios beside the times.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Figure:
    """Samples of one figure for one system; `unit` is the unit of the numbers."""

    system: str
    figure: str
    unit: str
    samples: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


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


def report(name: str, figures: Sequence[Figure], baseline: str | None = None) -> None:
    """Print the table of one benchmark and write `results/<name>.json`.

    `baseline` names the system whose median of the same figure the ratios are taken against.
    """
    print(f"\n{name}")
    base = {f.figure: f.median for f in figures if f.system == baseline and f.samples}
    wide = max(len(f.system) for f in figures)
    long = max(len(f.figure) for f in figures)
    for figure in figures:
        if not figure.samples:
            print(f"  {figure.figure:<{long}}  {figure.system:<{wide}}  no sample: {figure.note}")
            continue
        low, high = min(figure.samples), max(figure.samples)
        line = (
            f"  {figure.figure:<{long}}  {figure.system:<{wide}}  median {figure.median:9.4f} "
            f"{figure.unit}  [{low:.4f} … {high:.4f}]  n={len(figure.samples)}"
        )
        reference = base.get(figure.figure)
        if reference and figure.system != baseline:
            line += f"  {figure.median / reference:6.2f} x {baseline}"
        print(line + (f"  ({figure.note})" if figure.note else ""))
    RESULTS.mkdir(exist_ok=True)
    document = {"machine": machine(), "figures": [asdict(f) for f in figures]}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.flush()
