"""What a job has beside its workers: a folder each. Without its folder, a feature is not there.

A feature consists of chapters. Each process asks for those of one name (`chapters`), and names no
feature. So a folder that is added or removed changes no other file.

| chapter | its names | used by |
|---|---|---|
| `machine` | `MACHINES`: declarations of machines (`runtime.machines`) | the driver, replay |
| `driver` | perhaps `part(setup, began)`: what it does in the driver's thread | the driver |
| `routes` | `ROUTES`: rows; `STATUS`, `parts` (below) | the driver |
| `metrics` | `families(document)`: those of Prometheus, from the status | the driver |
| `companion` | `begin(run)`: starts what runs beside a job | the driver |
| `command`, `report` | checks of hosts (`runtime.host_checks`); their `DOCUMENT` | both |
| `sentences` | `SENTENCES`: what people read of it | `elasticctl` |
| `html` | `write(…)`: a page of a job that may be over, in one file | `elasticctl` |

A machine of the feature answers its rows; `STATUS` has the status of HTTP by the code of its
`Rejection`. Where `routes` has `parts(serving)`, what this returns answers them.

The other chapters are the feature's own: `messages` are its documents, events and decisions;
`worker` runs in a user's script.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Row = tuple[str, ...]


def _no_rows(_document: Mapping[str, Any]) -> list[Row]:
    return []


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """What people read of a feature.

    Args:
        status: returns what `elasticctl status` shows below the job, from the decoded document of
            `GET /v1/status`: a row of headings and rows of a table, or one row of one line.
    """

    status: Callable[[Mapping[str, Any]], list[Row]] = _no_rows


@cache
def chapters(name: str) -> tuple[ModuleType, ...]:
    """Return the chapters of a name, by the names of their features; each is imported."""
    features = sorted(each.name for each in pkgutil.iter_modules(__path__))
    wanted = (f"{__name__}.{feature}.{name}" for feature in features)
    return tuple(import_module(each) for each in wanted if find_spec(each) is not None)
