"""Ranks of an outer mpirun: how many there are, and the hosts they make up."""

from __future__ import annotations

import sys

import pytest

from elastic_driver.errors import UsageError
from launcher.backends.mpi_ranks import count_ranks, meet_ranks, started_ranks


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "2"}, 2),
        ({"PMI_SIZE": "x"}, 1),
        ({"PMI_SIZE": "9" * 5000}, 1),
    ],
)
def test_the_number_of_ranks_is_what_mpirun_says(environ: dict[str, str], ranks: int) -> None:
    assert started_ranks(environ) == ranks


def test_a_host_has_a_slot_for_each_rank_in_the_order_of_ranks() -> None:
    assert count_ranks(["b", "a", "b"]) == (("b", 2), ("a", 1))
    with pytest.raises(UsageError, match="an invalid name"):
        count_ranks(["a", "-x"])


def test_without_mpi4py_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'elastic-driver\[mpi\]'"):
        meet_ranks()
