"""Ranks, local ranks and cross ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.job.ranks import assign
from tests.job.test_ranks import seats


@given(st.permutations([(h, s) for h in "abcd" for s in range(3)]), st.integers(1, 12))
def test_any_mixture_gives_contiguous_hosts_and_consistent_sizes(
    where: list[tuple[str, int]], size: int
) -> None:
    places = [place for _, place in assign(seats(*where[:size]))]
    assert [p.rank for p in places] == list(range(size))
    hosts = [p.host for p in places]
    assert hosts == sorted(hosts, key=hosts.index)
    for place in places:
        mates = [p for p in places if p.host == place.host]
        peers = [p for p in places if p.local_rank == place.local_rank]
        assert place.local_size == len(mates)
        assert place.cross_size == len(peers)
        assert [p.cross_rank for p in peers] == list(range(len(peers)))
        assert [p.local_rank for p in mates] == list(range(len(mates)))


@given(st.permutations([(h, s) for h in "abc" for s in range(3)]), st.sets(st.integers(0, 8)))
def test_survivors_keep_their_order(where: list[tuple[str, int]], lost: set[int]) -> None:
    before = seats(*where)
    survivors = [seat for age, seat in enumerate(before) if age not in lost]
    order = [worker for worker, _ in assign(before)]
    after = [worker for worker, _ in assign(survivors)]
    for host in "abc":
        assert [w for w in after if w[0] == host] == [
            w for w in order if w in after and w[0] == host
        ]
    if survivors:
        assert after[0] == survivors[0].worker  # the oldest member is rank 0
