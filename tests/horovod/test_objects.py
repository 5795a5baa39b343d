"""Objects, parameters and optimizer states between the ranks of a real job."""

from __future__ import annotations

import pytest

from tests.horovod.on_ranks import STALL, checks_of, run_on

pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found."""
    return run_on(3, "objects.py", tmp_path_factory.mktemp("results"), STALL)


@pytest.mark.parametrize("check", checks_of("objects.py"))
def test_on_every_rank(results: list[dict[str, str]], check: str) -> None:
    for rank, found in enumerate(results):
        assert found[check] == "ok", f"rank {rank}:\n{found[check]}"
