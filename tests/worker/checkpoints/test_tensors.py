"""The rows that each rank writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.worker.checkpoints.folder import Piece, rows_and_bytes, share
from elastic_driver.worker.state_sync.contents import TensorKind

Kinds = dict[str, TensorKind]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from(["uint8", "float16", "float32", "float64"])
all_kinds = st.lists(st.tuples(dtypes, shapes), max_size=12).map(
    lambda kinds: {str(number): kind for number, kind in enumerate(kinds)}
)


def size_in_bytes(kind: TensorKind) -> int:
    rows, row_bytes = rows_and_bytes(kind)
    return rows * row_bytes


@given(all_kinds, st.integers(1, 9))
def test_every_row_belongs_to_exactly_one_rank(kinds: Kinds, size: int) -> None:
    owners: dict[tuple[str, int], int] = {}
    for rank in range(size):
        for piece in share(kinds, rank, size):
            for row in range(piece.start, piece.stop):
                assert (piece.tensor, row) not in owners
                owners[piece.tensor, row] = rank
    expected = {
        (name, row)
        for name, kind in kinds.items()
        if size_in_bytes(kind)
        for row in range(rows_and_bytes(kind)[0])
    }
    assert set(owners) == expected


@given(all_kinds, st.integers(1, 9))
def test_no_share_is_further_from_the_mean_than_one_row(kinds: Kinds, size: int) -> None:
    mean = sum(map(size_in_bytes, kinds.values())) / size
    row = max((rows_and_bytes(kind)[1] for kind in kinds.values()), default=0)
    for rank in range(size):
        pieces = share(kinds, rank, size)
        own = sum((p.stop - p.start) * rows_and_bytes(kinds[p.tensor])[1] for p in pieces)
        assert abs(own - mean) <= max(row, 1)


@given(all_kinds, st.integers(1, 9), st.data())
def test_a_rank_has_at_most_one_piece_of_a_tensor(
    kinds: Kinds, size: int, data: st.DataObject
) -> None:
    pieces = share(kinds, data.draw(st.integers(0, size - 1)), size)
    numbers = [int(piece.tensor) for piece in pieces]
    assert numbers == sorted(set(numbers))


def test_one_large_tensor_is_cut_between_its_rows() -> None:
    big = {"big": ("float32", (10, 100))}
    assert [share(big, rank, 3) for rank in range(3)] == [
        [Piece("big", 0, 3)],
        [Piece("big", 3, 6)],
        [Piece("big", 6, 10)],
    ]
