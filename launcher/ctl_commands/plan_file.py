"""Reads the file of `elasticctl apply`: a plan for a running job, in YAML."""

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from elastic_driver.core.events import PlanApplied
from elastic_driver.errors import UsageError

MAX_BYTES = 65536
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)


def read_plan(path: Path, newest: int) -> PlanApplied:
    """Return the plan in a file; without a `number` it is the next one after `newest`.

    Raises UsageError, in one line, for a file that cannot be read or is no plan.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        return parse_plan(yaml.safe_load(text), newest)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(f"{path} is no plan: {' '.join(str(error).split())}") from error


def parse_plan(read: Any, newest: int) -> PlanApplied:
    """Return the plan that a file says; raises ValueError for one that is none."""
    if not isinstance(read, dict) or not read:
        names = ", ".join(PlanApplied.__struct_fields__)
        raise ValueError(f"it needs some of {names}, each with a value")
    said = {str(name).replace("-", "_"): value for name, value in read.items()}
    if isinstance(size := said.get("memory_per_worker"), str):
        said["memory_per_worker"] = parse_bytes(size)
    return msgspec.convert({"number": newest + 1, **said}, PlanApplied)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 512MiB, 8G (10⁹) or 1.5 TiB; raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a size is a number and a unit, as 8GiB, not {text[:40]!r}")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()])
