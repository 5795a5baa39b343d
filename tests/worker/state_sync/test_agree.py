"""The state that wins follows from the world alone, and is the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.words.world import StateVersion
from elastic_driver.worker.state_sync.sharing import StateLostError, agree

Standing = tuple[int, bool]  # version, clean


def ranks(*standings: Standing) -> list[StateVersion]:
    return [StateVersion(*standing) for standing in standings]


def test_at_the_start_rank_0_is_what_everybody_starts_with() -> None:
    found = agree(ranks((-1, True), (-1, True), (-1, True)), 1)
    assert (found.source, found.receivers, found.version, found.fresh) == (0, {1, 2}, 0, True)


def test_nobody_receives_where_all_have_the_same() -> None:
    found = agree(ranks((7, True), (7, True)), 2)
    assert found.receivers == frozenset()
    assert (found.version, found.fresh) == (7, False)


def test_the_furthest_clean_rank_is_the_source_and_others_receive() -> None:
    found = agree(ranks((6, True), (7, True), (7, True), (6, True)), 2)
    assert (found.source, found.receivers, found.version) == (1, {0, 3}, 7)


def test_a_dirty_rank_gives_way_to_a_clean_one_though_it_is_further() -> None:
    found = agree(ranks((9, False), (7, True)), 2)
    assert (found.source, found.receivers, found.version) == (1, {0}, 7)


def test_a_dirty_rank_receives_though_it_has_as_many_steps() -> None:
    found = agree(ranks((7, True), (7, False)), 2)
    assert (found.source, found.receivers) == (0, {1})


@pytest.mark.parametrize("standings", [[(4, False), (6, False)], [(-1, True), (3, False)]])
def test_a_trained_state_that_no_rank_has_whole_is_lost(standings: list[Standing]) -> None:
    with pytest.raises(StateLostError, match="round 5: no worker holds the state of the last"):
        agree(ranks(*standings), 5)


def test_a_lost_state_is_read_from_a_checkpoint_by_rank_0_where_that_is_possible() -> None:
    found = agree(ranks((-1, True), (3, False)), 2, reloads=True)
    assert (found.source, found.receivers, found.fresh) == (0, {1}, True)


def test_a_half_received_state_is_never_what_others_get() -> None:
    with pytest.raises(StateLostError, match="the last one with the whole state is gone"):
        agree(ranks((-1, False), (-1, False)), 2)


def test_a_state_that_is_gone_with_its_workers_is_not_begun_anew() -> None:
    with pytest.raises(
        StateLostError, match=r"step 66 or later is gone: .* it has no checkpoint_dir; give"
    ):
        agree(ranks((-1, True), (-1, True)), 2, gone=66)
    assert agree(ranks((-1, True), (-1, True)), 2, gone=66, reloads=True).fresh
    assert not agree(ranks((-1, True), (7, True)), 2, gone=66).fresh, "one has it after all"


def test_a_checkpoint_is_no_excuse_to_drop_a_whole_state() -> None:
    found = agree(ranks((-1, True), (3, True)), 2, reloads=True)
    assert (found.source, found.version, found.fresh) == (1, 3, False)


def test_an_untrained_state_counts_from_the_steps_of_the_states_before_it() -> None:
    found = agree(ranks((-1, True), (-1, True)), 2, least=7)
    assert (found.source, found.receivers, found.version, found.fresh) == (0, {1}, 7, True)


def test_in_a_repair_all_others_receive_though_their_steps_are_as_many() -> None:
    found = agree(ranks((7, True), (7, True), (6, True)), 2, repair=True)
    assert (found.source, found.receivers, found.version) == (0, {1, 2}, 7)


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_whoever_keeps_its_own_state_has_that_of_the_source_which_is_whole(
    standings: list[Standing], reloads: bool, repair: bool
) -> None:
    states = ranks(*standings)
    whole = [state.steps for state in states if state.clean and state.trained]
    touched = any(state.trained or not state.clean for state in states)
    if touched and not whole and not reloads:
        with pytest.raises(StateLostError):
            agree(states, 2, repair=repair)
        return
    found = agree(states, 2, reloads=reloads, repair=repair)
    others = frozenset(range(len(states))) - {found.source}
    assert found.receivers <= others
    assert found.version == max(whole, default=max(0, states[found.source].steps))
    assert found.fresh == (not whole)
    if whole:
        assert states[found.source] == StateVersion(max(whole), True)
        assert all(states[rank] == states[found.source] for rank in others - found.receivers)
    if repair or not whole:
        assert found.receivers == others
