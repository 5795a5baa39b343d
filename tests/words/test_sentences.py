"""Numbers and tables as people read them."""

import pytest

from elastic_driver.words import aligned, counted


def test_numbers_have_their_noun() -> None:
    assert counted(1, "worker") == "1 worker"
    assert counted(1200, "worker") == "1,200 workers"
    assert counted(2, "host is", "hosts are") == "2 hosts are"


def test_columns_are_aligned() -> None:
    rows = [["job", "steps", "why"], ["a", "10", ""], ["longer", "9", "slow"]]
    assert aligned(rows) == ["job     steps  why", "a       10", "longer  9      slow"]
    assert aligned(rows, right=range(1, 2)) == [
        "job     steps  why",
        "a          10",
        "longer      9  slow",
    ]
    assert aligned([]) == []


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        aligned([["a", "b"], ["c"]])
