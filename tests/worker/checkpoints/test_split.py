"""Which rank writes which rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.worker.checkpoints.split import Extent, Piece, share

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
extents = st.lists(st.builds(Extent, shapes, st.sampled_from([1, 2, 4, 8])), max_size=12)


@given(extents, st.integers(1, 9))
def test_every_row_belongs_to_exactly_one_rank(tensors: list[Extent], size: int) -> None:
    owners: dict[tuple[int, int], int] = {}
    for rank in range(size):
        for piece in share(tensors, rank, size):
            for row in range(piece.start, piece.stop):
                assert (piece.tensor, row) not in owners
                owners[piece.tensor, row] = rank
    expected = {(i, row) for i, t in enumerate(tensors) if t.bytes for row in range(t.rows)}
    assert set(owners) == expected


@given(extents, st.integers(1, 9))
def test_no_share_is_further_from_the_mean_than_one_row(tensors: list[Extent], size: int) -> None:
    mean = sum(t.bytes for t in tensors) / size
    row = max((t.row_bytes for t in tensors), default=0)
    for rank in range(size):
        pieces = share(tensors, rank, size)
        own = sum((p.stop - p.start) * tensors[p.tensor].row_bytes for p in pieces)
        assert abs(own - mean) <= max(row, 1)


@given(extents, st.integers(1, 9), st.data())
def test_a_rank_has_at_most_one_piece_of_a_tensor(
    tensors: list[Extent], size: int, data: st.DataObject
) -> None:
    pieces = share(tensors, data.draw(st.integers(0, size - 1)), size)
    indices = [piece.tensor for piece in pieces]
    assert indices == sorted(set(indices))


def test_one_large_tensor_is_cut_between_its_rows() -> None:
    big = Extent((10, 100), 4)
    assert [share([big], rank, 3) for rank in range(3)] == [
        [Piece(0, 0, 3)],
        [Piece(0, 3, 6)],
        [Piece(0, 6, 10)],
    ]
