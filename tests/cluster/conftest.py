"""A fresh cluster for each test, where one can be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, why_not

_REASON = why_not()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """head and node0 … node3."""
    if _REASON is not None:
        pytest.skip(_REASON)
    with Cluster(4) as cluster:
        yield cluster
