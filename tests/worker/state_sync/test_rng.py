"""The generators' states are right at every commit, however the generators have been moved."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from elastic_driver.worker.state_sync.contents import RandomStates

WORDS = 624  # after so many draws of one word a Mersenne Twister's position is the same again


def nothing() -> None:
    """Leave the generators where they are."""


@pytest.mark.parametrize(
    "move",
    [
        nothing,
        random.random,
        lambda: random.gauss(0, 1),
        lambda: [random.getrandbits(32) for _ in range(WORDS)],
        lambda: random.seed(3),
        lambda: random.setstate(random.Random(4).getstate()),
    ],
    ids=["nothing", "one", "gaussian", "a whole turn", "seed", "setstate"],
)
def test_pythons_state_is_the_one_python_says(move: Callable[[], object]) -> None:
    states = RandomStates()
    for _ in range(4):
        assert states.take()["python"] == random.getstate()
        move()
    assert states.take()["python"] == random.getstate()


def said() -> str:
    """NumPy's own answer, which is a tuple for its usual generator only."""
    usual = isinstance(np.random.get_bit_generator(), np.random.MT19937)
    return repr(np.random.get_state(legacy=usual))


@pytest.mark.parametrize(
    "move",
    [
        nothing,
        np.random.random,
        np.random.standard_normal,
        lambda: np.random.shuffle(list(range(7))),
        lambda: np.random.randint(0, 2**32, size=WORDS, dtype=np.uint32),
        lambda: np.random.seed(3),
        lambda: np.random.set_bit_generator(np.random.MT19937(5)),
        lambda: np.random.set_bit_generator(np.random.PCG64(5)),
    ],
    ids=[
        "nothing",
        "one",
        "gaussian",
        "shuffle",
        "a whole turn",
        "seed",
        "exchanged",
        "other kind",
    ],
)
def test_numpys_state_is_the_one_numpy_says(move: Callable[[], object]) -> None:
    states, before = RandomStates(), np.random.get_bit_generator()
    try:
        for _ in range(4):
            assert repr(states.take()["numpy"]) == said()
            move()
        assert repr(states.take()["numpy"]) == said()
    finally:
        np.random.set_bit_generator(before)


def test_numpys_generator_is_not_asked_where_it_has_not_moved() -> None:
    states = RandomStates()
    first = states.take()
    assert states.take()["numpy"] is first["numpy"]
    np.random.random()
    assert states.take()["numpy"] is not first["numpy"]


def test_another_generator_than_numpys_own_is_kept_and_not_sent() -> None:
    states, before = RandomStates(), np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        taken = states.take()
        drawn = np.random.random()
        states.put(taken)
        assert np.random.random() == drawn
        assert "numpy" not in states.portable()
    finally:
        np.random.set_bit_generator(before)


def test_what_was_taken_can_be_put_back() -> None:
    states = RandomStates()
    taken = states.take()
    drawn = [random.random(), np.random.random(), torch.rand(1).item()]
    states.put(taken)
    assert [random.random(), np.random.random(), torch.rand(1).item()] == drawn


def test_what_is_sent_sets_another_processs_generators_to_the_same_draws() -> None:
    states = RandomStates()
    torch.randn(1)  # leaves a second Gaussian in store
    sent = states.portable()
    drawn = [random.random(), np.random.random(), torch.randn(1).item()]
    states.put(sent)
    assert [random.random(), np.random.random(), torch.randn(1).item()] == drawn
