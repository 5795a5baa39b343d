"""A plan of faults, and the objectives that the job has to meet: a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]
Number = Annotated[int, Meta(ge=0, le=10**6)]


class Objectives(Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds that the job has to keep; times are seconds, memory is in MiB.

    `recovery_p99`: from the end of a fault to the step that all workers finish together after it.
    `rogue_gap`: the longest time between two steps of one worker while rogue clients are all that
    happens. `descriptors`, `connections`, `threads`, `memory`: by how much a driver or an agent may
    have more than when it had settled; connections that are open at both ends are no descriptors
    here. A lost or repeated step, an exit status that was not asked for, and whatever is left of
    the job are never allowed.
    """

    recovery_p99: Seconds
    rogue_gap: Seconds
    descriptors: Number = 8
    connections: Number = 24
    threads: Number = 4
    memory: Number = 32


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """Faults by name, each with how often it comes in a turn; the seed shuffles each turn.

    `seconds`: how long the faults last in all; a turn that has begun is ended early. `hosts`: above
    0, so many hosts in namespaces (root), else the job is on this machine, with `workers` in two
    agents. `peace`: seconds between two faults, drawn between the two. `held`: seconds for which
    something is stopped, cut or full, or for which rogue clients come.
    """

    seconds: Seconds
    faults: dict[str, Annotated[int, Meta(ge=1, le=100)]]
    objectives: Objectives
    workers: Annotated[int, Meta(ge=2, le=64)] = 3
    hosts: Annotated[int, Meta(ge=0, le=16)] = 0
    step_ms: Annotated[float, Meta(ge=1.0, le=1000.0)] = 20.0
    peace: tuple[Seconds, Seconds] = (0.2, 1.0)
    held: Seconds = 2.0
    seed: Number = 1


def read_plan(path: Path) -> Plan:
    """The plan in a file; raises ValueError with what is wrong."""
    return msgspec.yaml.decode(path.read_bytes(), type=Plan)
