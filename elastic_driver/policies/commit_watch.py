"""Ranks that commit while others only train, or the other way round: the script is wrong. Pure.

Every rank has to call `commit()` after the same steps. A rank that never does is not seen by
anything else until the world changes: then its state is that of the round's beginning.
"""

from collections.abc import Mapping
from typing import NamedTuple

from elastic_driver.policies.state_difference import name_ranks
from elastic_driver.words.progress import ODD_STEPS, Progress

LATE = 3.0  # times the steps that other ranks take for a commit


class Oddity(NamedTuple):
    """What is wrong, and the ranks that are to blame."""

    kind: str  # no_commits or no_steps
    ranks: tuple[int, ...]
    reason: str


def find_oddity(progress: Mapping[int, Progress]) -> Oddity | None:
    """Return what is wrong with the commits of a round; `progress` by rank, of this round."""
    if all(bool(each.commits) == bool(each.optimizer_steps) for each in progress.values()):
        return None  # as in nearly all looks
    commits = {rank: each for rank, each in progress.items() if each.commits >= ODD_STEPS}
    if not commits:
        return None
    others = f"{_have(sorted(commits))} made {min(c.commits for c in commits.values())} commits"
    a_commit = max(each.optimizer_steps / each.commits for each in commits.values())
    least = max(ODD_STEPS, LATE * a_commit)
    silent = [
        rank for rank, p in sorted(progress.items()) if not p.commits and p.optimizer_steps >= least
    ]
    if silent:
        return Oddity(
            "no_commits",
            tuple(silent),
            f"{_have(silent)} trained at least {int(least)} steps in this round without a commit, "
            f"{others}; every rank has to call state.commit() after the same steps",
        )
    trains = any(each.optimizer_steps >= ODD_STEPS for each in commits.values())
    idle = [rank for rank, each in sorted(commits.items()) if not each.optimizer_steps]
    if trains and idle:
        steps = max(each.optimizer_steps for each in commits.values())
        return Oddity(
            "no_steps",
            tuple(idle),
            f"{_have(idle)} committed at least {ODD_STEPS} times in this round and stepped no "
            f"optimizer, others have made {steps} steps; every rank has to train",
        )
    return None


def _have(ranks: list[int]) -> str:
    return f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'}"
