"""The scale of the gradients' noise, from simulated gradients with a known one."""

from __future__ import annotations

import numpy as np
import pytest

from elastic_driver.features.sizes.gauge import efficiency
from elastic_driver.runtime.driver_parts import LEAST_NOISE, MOST_NOISE, noise_scale
from elastic_driver.words.progress import GradientNorms


def norms(size: int, sigma: float, steps: int = 4000, width: int = 50) -> list[GradientNorms]:
    """The mean squared norms of ranks whose gradients are (1, 1, …) plus noise."""
    random = np.random.default_rng(1)
    gradients = 1 + sigma * random.standard_normal((steps, size, width))
    mean = (gradients.mean(axis=1) ** 2).sum(axis=1).mean()
    own = (gradients**2).sum(axis=2).mean(axis=0)
    return [GradientNorms(float(each), float(mean)) for each in own]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
def test_it_is_the_variance_of_a_batch_over_the_square_of_the_mean(size: int, sigma: float) -> None:
    assert noise_scale(norms(size, sigma)) == pytest.approx(sigma**2, rel=0.1)


def test_equal_gradients_have_none_and_pure_noise_has_the_most() -> None:
    assert noise_scale(norms(4, 0.0)) in (LEAST_NOISE, pytest.approx(LEAST_NOISE), None)
    assert noise_scale([GradientNorms(2.0, 1.0), GradientNorms(2.0, 1.0)]) == MOST_NOISE


def test_one_worker_and_gradients_of_zero_tell_nothing() -> None:
    assert noise_scale([GradientNorms(1.0, 1.0)]) is None
    assert noise_scale([GradientNorms(0.0, 0.0)] * 2) is None


def test_a_sample_teaches_less_in_a_larger_batch_unless_noise_hides_the_gradient() -> None:
    assert efficiency(3.0, 1) == 1.0
    assert efficiency(1.0, 3) == pytest.approx(0.5)
    assert efficiency(MOST_NOISE, 8) == pytest.approx(1.0, abs=1e-4)
