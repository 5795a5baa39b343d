"""Ranks that share the writing, meeting in the folder only: here as objects in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.errors import ElasticError
from elastic_driver.words.orders import World
from elastic_driver.words.world import Member, SlotInfo
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints import keeper
from elastic_driver.worker.checkpoints.folder import file_name
from elastic_driver.worker.checkpoints.keeper import Checkpoints
from elastic_driver.worker.state_sync.contents import RandomStates
from elastic_driver.worker.state_sync.sharing import LiveState
from elastic_driver.worker.state_sync.steps import Steps
from elastic_driver.worker.state_sync.tree import Tree
from tests.support.coordinator import eventually


def world(size: int, round_id: int = 1) -> World:
    members = tuple(
        Member(f"host.{rank}.1", SlotInfo("host", rank, rank, rank, 0, size, size, 1, 0, 1))
        for rank in range(size)
    )
    return World(round_id, members, "test")


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait, when the tests end, for checkpoints that a test left half-written."""
    monkeypatch.setattr(keeper, "PATIENCE_S", 20.0)
    monkeypatch.setattr(keeper.atexit, "register", lambda _: None)


def shared(seed: int, **more: Any) -> LiveState:
    """A state with tensors of many kinds: dtypes, scalars, strides, one without elements."""
    make = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=make))
    values: dict[str, Any] = {
        "model": model,
        "half": torch.rand(11, 2, generator=make).bfloat16(),
        "flags": torch.rand(13, generator=make) > 0.5,
        "turned": torch.rand(4, 6, generator=make).t(),
        "scalar": torch.tensor(seed),
        "none": torch.zeros(0, 4),
        "nested": {"list": [torch.rand(2, 2, 2, generator=make), seed], "a.b": "text"},
        **more,
    }
    tree = Tree(values, Steps())
    tree.keep()
    return LiveState(tree, RandomStates())


def contents(state: LiveState) -> list[Any]:
    plain: list[Any] = [(n, v.tolist()) for n, v in state.values["model"].state_dict().items()]
    for name in ("half", "flags", "turned", "scalar", "none"):
        plain.append((name, state.values[name].dtype, state.values[name].tolist()))
    inner = state.values["nested"]
    return [*plain, inner["list"][0].tolist(), inner["list"][1], inner["a.b"]]


class Ranks:
    """The members of one world."""

    def __init__(self, root: Path, size: int, round_id: int = 1, keep: int = 3) -> None:
        self.root = root
        self.each = [Checkpoints(root, every=10, keep=keep) for _ in range(size)]
        self.enter(world(size, round_id))

    def enter(self, new: World) -> None:
        for rank, one in enumerate(self.each[: new.size]):
            one.enter(new, rank)

    def take(self, version: int, state: LiveState) -> None:
        for one in self.each:
            one.take_if_due(state, version)

    def drain(self) -> bool:
        """Wait for all, rank 0 last; whether nothing is under way any more."""
        drained = [one.drain() for one in reversed(self.each)]
        return all(drained)

    def complete(self) -> list[int | None]:
        found = folders.checkpoints(self.root) if self.root.exists() else []
        return [folders.version_of(path) for path in found if folders.is_complete(path)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_whatever_the_number_of_writers_one_reader_gets_the_same(tmp_path: Path, size: int) -> None:
    state = shared(1)
    ranks = Ranks(tmp_path, size)
    ranks.take(10, state)
    assert ranks.drain()
    found = shared(2)
    assert Checkpoints(tmp_path, 10).load_newest(found) == 10
    assert contents(found) == contents(state)


class Shelf:
    """A part that adds something to checkpoints only."""

    def __init__(self, told: str, count: int = 0) -> None:
        self.told, self.count = told, count
        self.threads: list[str] = []

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def durable(self) -> Callable[[], bytes]:
        self.threads.append(threading.current_thread().name)
        told = self.told

        def note() -> bytes:
            self.threads.append(threading.current_thread().name)
            return told.encode()

        return note

    def restore_durable(self, data: bytes) -> None:
        self.told = f"{data.decode()} at {self.count}"


def test_what_a_part_adds_is_of_the_commit_and_comes_back_after_its_state(tmp_path: Path) -> None:
    shelf, empty = Shelf("first", count=3), Shelf("")
    ranks = Ranks(tmp_path, 2)
    state = shared(1, shelf=shelf, empty=empty)
    ranks.take(10, state)
    shelf.told = "later"
    assert ranks.drain()
    here = threading.current_thread().name
    assert shelf.threads == [here, "elastic-checkpoints"], "on rank 0 only"
    found, untouched = Shelf("mine"), Shelf("untouched")
    ranks.each[0].load_newest(shared(2, shelf=found, empty=untouched))
    assert (found.told, untouched.told) == ("first at 3", "untouched")


def test_a_part_whose_note_fails_costs_that_checkpoint_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Shelf):
        def durable(self) -> Callable[[], bytes]:
            def note() -> bytes:
                if self.count:
                    raise ElasticError("the shelf is away")
                return b"x"

            return note

    shelf = Broken("", count=1)
    ranks = Ranks(tmp_path, 1)
    ranks.take(10, shared(1, shelf=shelf))
    assert ranks.drain()
    assert ranks.complete() == []
    assert "the shelf is away; training goes on" in capsys.readouterr().err
    shelf.count = 0
    ranks.take(20, shared(1, shelf=shelf))
    assert ranks.drain()
    assert ranks.complete() == [20]


def test_each_rank_writes_its_share_only(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4)
    ranks.take(10, shared(1, big=torch.zeros(1000, 1000)))
    assert ranks.drain()
    sizes = [path.stat().st_size for path in tmp_path.glob("step-*/__*_0.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.05 * 1_000_000
    assert min(sizes) > 0.95 * 1_000_000


def test_what_is_written_is_the_state_at_the_commit(tmp_path: Path) -> None:
    state = shared(1)
    expected = contents(state)
    ranks = Ranks(tmp_path, 2)
    ranks.take(10, state)
    with torch.no_grad():
        for parameter in state.values["model"].parameters():
            parameter.zero_()  # the training goes on at once
    state.values["scalar"].fill_(0)
    assert ranks.drain()
    found = shared(2)
    ranks.each[0].load_newest(found)
    assert contents(found) == expected


def test_a_checkpoint_is_complete_when_the_last_rank_has_reported(tmp_path: Path) -> None:
    ranks, state = Ranks(tmp_path, 3), shared(1)
    ranks.each[0].take_if_due(state, 10)
    ranks.each[2].take_if_due(state, 10)
    assert ranks.each[0]._is_free(10)
    assert ranks.each[2].drain()
    assert ranks.complete() == []
    ranks.each[1].take_if_due(state, 10)
    assert ranks.drain()
    assert ranks.complete() == [10]


def test_one_that_lost_a_writer_stays_half_written_and_goes_with_the_next(tmp_path: Path) -> None:
    ranks, state = Ranks(tmp_path, 2), shared(1)
    ranks.each[0].take_if_due(state, 10)  # rank 1 was killed before its share
    ranks.each[0].enter(world(1, round_id=2), 0)
    ranks.each[0].take_if_due(state, 20)
    assert ranks.each[0].drain()
    assert ranks.complete() == [20]
    assert len(folders.checkpoints(tmp_path)) == 1


def test_the_rests_of_an_earlier_attempt_at_the_same_step_are_not_taken_for_ours(
    tmp_path: Path,
) -> None:
    before = Ranks(tmp_path, 2)
    before.each[1].take_if_due(shared(1), 10)
    assert before.each[1].drain()
    after = Ranks(tmp_path, 2, round_id=2)
    after.each[0].take_if_due(shared(2), 10)
    assert after.each[0]._is_free(10)
    assert after.complete() == []
    after.each[1].take_if_due(shared(2), 10)
    assert after.drain()
    found = shared(3)
    after.each[0].load_newest(found)
    assert contents(found) == contents(shared(2))


def test_one_of_an_earlier_run_with_the_same_name_is_kept_and_never_written_into(
    tmp_path: Path,
) -> None:
    before = Ranks(tmp_path, 2)
    before.take(10, shared(1))
    assert before.drain()
    (old,) = folders.newest_first(tmp_path)
    after = Ranks(tmp_path, 2)  # the run was begun anew, under its name
    after.each[1].take_if_due(shared(2), 10)
    after.each[0].take_if_due(shared(2), 10)  # rank 1 waits until it has made room
    assert after.drain()
    assert [path.name for path in folders.newest_first(tmp_path)] == [old.name, f"{old.name}.2"]
    assert all(folders.verified(path).version == 10 for path in folders.newest_first(tmp_path))
    found = shared(3)
    after.each[0].load_newest(found)
    assert contents(found) == contents(shared(2))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
@pytest.mark.parametrize("what", ["folder", "link to a folder", "link to a file"])
def test_what_others_have_prepared_in_a_shared_place_is_not_written_to(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who knows the name of a checkpoint to come could lead it to files of ours."""
    precious = tmp_path / "precious" / file_name(0)
    precious.parent.mkdir()
    precious.write_bytes(b"precious")
    known = Ranks(tmp_path / "elsewhere", 1)
    known.take(10, shared(1))
    assert known.drain()
    (path,) = folders.newest_first(tmp_path / "elsewhere")
    place = tmp_path / "shared" / path.name
    place.parent.mkdir()
    if what == "link to a folder":
        place.symlink_to(precious.parent)
    else:
        place.mkdir()
        place.chmod(0o777)
        (place / file_name(0)).symlink_to(precious)
    if what != "link to a file":
        os.chown(place, 12345, 12345, follow_symlinks=False)
    ranks = Ranks(tmp_path / "shared", 1)
    ranks.take(10, shared(2))
    ranks.drain()
    assert precious.read_bytes() == b"precious"
    assert ranks.complete() == []
    said = {"folder": "it belongs to user 12345", "link to a folder": "it is a link"}
    assert said.get(what, "Too many levels of symbolic links") in capsys.readouterr().err


def test_room_that_is_never_made_costs_that_checkpoint_and_not_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Ranks(tmp_path, 2)
    before.take(10, shared(1))
    assert before.drain()
    (old,) = folders.newest_first(tmp_path)

    def read_only(_folder: Path) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(keeper, "MAX_WAIT_S", 0.1)
    monkeypatch.setattr(folders, "make_room", read_only)
    after = Ranks(tmp_path, 2)
    after.take(10, shared(2))
    assert after.drain()
    assert folders.verified(old).version == 10
    said = capsys.readouterr().err
    assert "Read-only file system" in said
    assert "rank 0 did not rename it" in said


def test_old_ones_that_cannot_be_deleted_do_not_cost_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(5, os.strerror(5))

    ranks = Ranks(tmp_path, 1, keep=1)
    ranks.take(10, shared(1))
    assert ranks.drain()
    with monkeypatch.context() as patched:
        patched.setattr(folders, "retire", broken)
        ranks.take(20, shared(1))
        assert ranks.drain()
    assert ranks.complete() == [20, 10]
    ranks.take(30, shared(1))
    assert ranks.drain()
    assert ranks.complete() == [30]


def test_a_failing_rank_is_named_once_and_so_is_its_recovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic_driver.worker.checkpoints import folder as tensors

    write, full = tensors.write_share, True

    def fails_on_rank_1(folder: Path, staging: Any) -> Any:
        if staging.rank == 1 and full:
            raise OSError(28, os.strerror(28))
        return write(folder, staging)

    monkeypatch.setattr(tensors, "write_share", fails_on_rank_1)
    ranks, state = Ranks(tmp_path, 2), shared(1)
    for version in (10, 20):
        ranks.take(version, state)
        assert ranks.drain()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "step 10" in said[0]
    assert "rank 1: No space left on device" in said[0]
    assert folders.checkpoints(tmp_path) == []
    full = False
    for version in (30, 40):
        ranks.take(version, state)
        assert ranks.drain()
    assert ranks.complete() == [40, 30]
    assert "checkpoints are written again" in capsys.readouterr().err


def test_a_host_that_does_not_see_the_folder_says_so_and_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "not mounted here"
    rank_1 = Ranks(elsewhere, 2).each[1]
    for version in (10, 20):
        rank_1.take_if_due(shared(1), version)
        assert rank_1.drain()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "rank 1 finds no folder there" in said[0]
    assert not elsewhere.exists()


def test_ranks_with_different_tensors_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.each[0].take_if_due(shared(1), 10)
    ranks.each[1].take_if_due(shared(1, more=torch.zeros(2)), 10)
    assert ranks.drain()
    assert ranks.complete() == []
    assert "rank 1 has other tensors than rank 0" in capsys.readouterr().err


def test_reports_that_never_come_are_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PATIENCE_S", 0.2)
    ranks = Ranks(tmp_path, 2)
    ranks.each[0].take_if_due(shared(1), 10)
    assert ranks.each[0].drain()
    assert folders.checkpoints(tmp_path) == []
    assert "not every rank has written its part" in capsys.readouterr().err


def test_a_disk_that_hangs_holds_training_up_once_and_not_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic_driver.worker.checkpoints import folder as tensors

    write, answers = tensors.write_share, threading.Event()

    def hangs(folder: Path, staging: Any) -> Any:
        assert answers.wait(30)
        return write(folder, staging)

    monkeypatch.setattr(tensors, "write_share", hangs)
    monkeypatch.setattr(keeper, "MAX_WAIT_S", 0.1)
    ranks, state = Ranks(tmp_path, 1), shared(1)
    for version in (10, 20, 30):
        ranks.take(version, state)
    assert capsys.readouterr().err.count("has not answered for 0.1 s") == 1
    answers.set()
    eventually(lambda: ranks.complete() == [10], "the disk answers")
    assert ranks.drain()
    ranks.take(40, state)
    assert ranks.drain()
    assert ranks.complete() == [40, 10]


def test_no_thread_is_left_when_all_is_written(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    for version in (10, 20):
        ranks.take(version, shared(1))
    assert ranks.drain()
    eventually(
        lambda: not any(t.name == "elastic-checkpoints" for t in threading.enumerate()),
        "every thread has ended",
        within=10,
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_writer(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.each[0].take_if_due(shared(1), 10)  # never complete
    child = os.fork()
    if child == 0:
        os._exit(0 if ranks.each[0].drain() else 1)
    assert os.waitpid(child, 0)[1] == 0
