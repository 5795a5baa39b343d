"""Ranks that do not commit as the others do."""

from __future__ import annotations

from elastic_driver.features.stragglers.states import find_oddity
from elastic_driver.words.progress import ODD_STEPS, Progress


def ranks(*counts: tuple[int, int]) -> dict[int, Progress]:
    """The progress of ranks, each with its commits and the steps of its optimizers."""
    return {
        rank: Progress(1, commits, 0.1, commits=commits, optimizer_steps=steps)
        for rank, (commits, steps) in enumerate(counts)
    }


def test_a_rank_that_trains_and_never_commits_is_named() -> None:
    found = find_oddity(ranks((38, 38), (0, 40), (39, 39)))
    assert found is not None
    assert (found.kind, found.ranks) == ("no_commits", (1,))
    assert found.reason == (
        "rank 1 has trained at least 8 steps in this round without a commit, ranks 0, 2 have made "
        "38 commits; every rank has to call state.commit() after the same steps"
    )


def test_it_takes_some_of_each_on_both_sides() -> None:
    assert find_oddity(ranks((ODD_STEPS, ODD_STEPS), (0, ODD_STEPS - 1))) is None
    assert find_oddity(ranks((ODD_STEPS - 1, ODD_STEPS - 1), (0, 99))) is None
    assert find_oddity(ranks((ODD_STEPS, ODD_STEPS), (0, ODD_STEPS))) is not None
    assert find_oddity(ranks((ODD_STEPS, 0), (0, ODD_STEPS))) is not None, (
        "the hooks see no steps there"
    )


def test_ranks_that_commit_after_many_steps_are_right_though_one_heartbeat_is_older() -> None:
    assert find_oddity(ranks((20, 2000), (0, 99))) is None, "its first commit is near"
    assert find_oddity(ranks((20, 2000), (0, 299))) is None
    assert find_oddity(ranks((20, 2000), (0, 300))) is not None


def test_a_rank_that_commits_and_never_trains_is_named() -> None:
    found = find_oddity(ranks((40, 40), (41, 0)))
    assert found is not None
    assert (found.kind, found.ranks) == ("no_steps", (1,))
    assert "others have made 40 steps" in found.reason


def test_what_all_ranks_do_alike_is_right() -> None:
    for alike in ((40, 0), (40, 40), (40, 400), (0, 400), (0, 0)):
        assert find_oddity(ranks(alike, alike)) is None
    assert find_oddity({}) is None
