"""Slow links are found by what lies beside them, and never made up out of jitter."""

from __future__ import annotations

from random import Random

import pytest

from tests.features.stragglers.test_slow_links import Net


@pytest.mark.parametrize("seed", range(3))
def test_an_hour_of_jitter_names_nobody(seed: int) -> None:
    random = Random(seed)

    def jittered(_a: int, _b: int) -> float:
        pause = 8.0 if random.random() < 0.02 else 1.0
        return 0.1 * pause * random.lognormvariate(0.0, 0.5)

    assert Net(8).train(1800, jittered) == []
