"""Every number that comes from outside has bounds, and fits into what the journal is written in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from msgspec import inspect

from elastic_driver.features.checks.messages import TaskEnded, TaskResult
from elastic_driver.features.shards import messages as shards
from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.runtime.event_routes import ROUTES
from elastic_driver.words import joining as join
from elastic_driver.words import wire_events as ev
from elastic_driver.words.progress import OutputLines, Progress

RECEIVED = (
    *(
        ev.WireEvent,
        ev.StateDescribed,
        TaskEnded,
        TaskResult,
        *get_args(shards.Request),
        join.NodeReport,
    ),
    *(*get_args(tf.TfRequest.__annotations__["request"]), OutputLines),
    *(Progress, *(row.body for row in ROUTES)),
)


def numbers(info: Any, path: str) -> Iterator[tuple[str, inspect.IntType]]:
    """Every number in a type, with the names that lead to it."""
    match info:
        case inspect.IntType():
            yield path, info
        case inspect.StructType(cls=cls, fields=fields):
            for field in fields:
                yield from numbers(field.type, f"{cls.__name__}.{field.name}")
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for each in types:
                yield from numbers(each, path)
        case inspect.DictType(key_type=key, value_type=value):
            yield from numbers(key, path)
            yield from numbers(value, path)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from numbers(item, path)


@pytest.mark.parametrize("kind", RECEIVED, ids=lambda kind: getattr(kind, "__name__", "union"))
def test_numbers_have_bounds_of_64_bits(kind: Any) -> None:
    for path, info in numbers(inspect.type_info(kind), ""):
        assert info.ge is not None, path
        assert info.ge >= -(2**63), path
        assert info.le is not None, path
        assert info.le < 2**63, path
