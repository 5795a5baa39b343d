"""Shared by the tests of Horovod's API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import elastic_driver.horovod.torch as hvd
from elastic_driver.worker import current


@pytest.fixture
def world() -> Iterator[None]:
    """Be in a world of this process alone."""
    hvd.init()
    yield
    hvd.shutdown()
    current.forget()
