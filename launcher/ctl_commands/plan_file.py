"""Reads the file of `elasticctl apply`: a plan for a running job, in YAML."""

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from elastic_driver.errors import UsageError
from elastic_driver.words.wire_events import PlanApplied

MAX_BYTES = 65536
_FIELDS = ", ".join(PlanApplied.__struct_fields__)
_LEAST_BYTES = 2**20  # of a worker; less is a size without its unit
_AT = re.compile(r"^Expected (.*) - at `\$\.(\w+)`$")  # how msgspec says where
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
        return parse_plan(text, newest)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        why = _AT.sub(r"\2: expected \1", " ".join(str(error).split()))
        raise UsageError(f"{path} is no plan: {why}") from error


def parse_plan(text: bytes, newest: int) -> PlanApplied:
    """Return the plan that a file says; raises ValueError, or what YAML raises, for none."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    said = [(_name_of(key), value) for key, value in pairs]
    for name, _ in said:
        if name not in PlanApplied.__struct_fields__:
            raise ValueError(f"{name!r} is none of {_FIELDS}")
        if [each for each, _ in said].count(name) > 1:
            raise ValueError(f"{name} appears twice")
    plan = {name: _read(value) for name, value in said}
    if all(plan[name] is None for name in plan if name != "number"):
        raise ValueError(f"it needs some of {_FIELDS.removeprefix('number, ')}, each with a value")
    size = plan.get("memory_per_worker")
    if isinstance(size, str):
        size = plan["memory_per_worker"] = parse_bytes(size)
    if isinstance(size, int) and 0 < size < _LEAST_BYTES:
        raise ValueError(f"{size} bytes for a worker are too few; add a unit, as {size}GiB")
    return msgspec.convert({"number": newest + 1, **plan}, PlanApplied)


def _name_of(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode):
        raise ValueError("one of its names is a list or a mapping")
    return str(key.value).replace("-", "_")[:40]


def _read(node: yaml.Node) -> Any:
    """Return the value that a node says, of the types that a plan has."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 512MiB, 8G (10⁹) or 1.5 TiB; raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a size is a number and a unit, as 8GiB, not {text[:40]!r}")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()])
