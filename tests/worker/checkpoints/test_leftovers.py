"""Folders with checkpoints that cannot be read, of another format, or of another training."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import elastic_driver as elastic
from elastic_driver.errors import UsageError
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints import keeper
from tests.support.permissions import where_permissions_apply


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test is a process of its own, as far as the membership goes."""
    elastic.shutdown()
    yield
    elastic.shutdown()
    gc.collect()  # an error may hold the state of a test


def train(folder: Path, steps: int, **options: Any) -> tuple[int, int]:
    """Train so many steps, a checkpoint after each second one; return the first and the last."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, **options}
    state: Any = elastic.TorchState(checkpoint_dir=folder, every=2, **given)
    began: list[int] = []

    @elastic.run
    def run(state: Any) -> None:
        began.append(state.step)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    run(state)
    assert state._checkpoints.drain()
    elastic.shutdown()
    return began[0], state.step


def steps(folder: Path) -> list[int]:
    found = [path for path in folders.checkpoints(folder) if folders.is_complete(path)]
    return sorted(folders.version_of(path) for path in found)


@pytest.mark.parametrize("pattern", ["__*", "manifest.json", "values.msgpack"])
def test_checkpoints_that_cannot_be_read_do_not_count_as_newer_and_stay(
    tmp_path: Path, pattern: str
) -> None:
    train(tmp_path, 20)
    for path in tmp_path.glob(f"*/{pattern}"):
        path.chmod(0)
    began: list[tuple[int, int]] = []

    def two_jobs() -> None:
        began.extend(train(tmp_path, 10) for _ in range(2))

    where_permissions_apply(two_jobs)
    assert began == [(0, 10), (10, 20)], "the second goes on from what the first has written"
    assert steps(tmp_path) == sorted([16, 18, 20] * 2), "three of each training"
    for path in tmp_path.rglob(pattern):
        path.chmod(0o600)
    assert train(tmp_path, 1)[0] == 20, "they are readable again, and still the older ones"


def test_a_folder_that_cannot_be_listed_is_no_reason_to_begin_anew_where_another_can_be_read(
    tmp_path: Path,
) -> None:
    train(tmp_path, 6)
    newest = folders.newest_first(tmp_path)[0]
    newest.chmod(0)
    found: list[int] = []
    where_permissions_apply(lambda: found.append(train(tmp_path, 4)[0]))
    newest.chmod(0o700)
    assert found == [4]
    assert newest.is_dir()
    assert steps(tmp_path) == [4, 6, 6, 8]
    assert train(tmp_path, 1)[0] == 8


def test_a_disk_error_while_loading_costs_no_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 20)
    before = {path.name for path in folders.newest_first(tmp_path)}

    def broken(_folder: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(folders, "verified", broken)
        assert train(tmp_path, 30) == (0, 30)
    assert capsys.readouterr().err.count("cannot be read: Input/output error") == 3
    assert before <= {path.name.removesuffix(".2") for path in folders.newest_first(tmp_path)}
    assert train(tmp_path, 1)[0] == 30


def test_a_folder_that_appears_after_the_start_keeps_what_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 8)
    before = {path.name for path in folders.newest_first(tmp_path)}

    def not_mounted(_root: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(folders, "sweep", not_mounted)
        assert train(tmp_path, 20) == (0, 20)
    assert before <= {path.name.removesuffix(".2") for path in folders.newest_first(tmp_path)}
    assert train(tmp_path, 1)[0] == 20


def test_a_training_keeps_so_many_over_several_jobs(tmp_path: Path) -> None:
    for job in range(4):
        assert train(tmp_path, 5, keep=2) == (job * 4, job * 4 + 5)
    assert steps(tmp_path) == [14, 16]


def test_a_rank_that_has_not_loaded_finds_the_ones_before(tmp_path: Path) -> None:
    train(tmp_path, 6, keep=2)
    history = keeper.History()  # of a survivor that completes its first one
    folder = tmp_path / folders.folder_name(8, "2-abc")
    found = history.before(tmp_path, folder, folders.ages(tmp_path))
    assert [folders.version_of(tmp_path / name) for name in found] == [6, 4]


def write_as_format(folder: Path, number: int) -> None:
    """Give a checkpoint the manifest of another format."""
    manifest = msgspec.json.decode((folder / folders.MANIFEST).read_bytes().partition(b"\n")[2])
    body = msgspec.json.encode({**manifest, "format": number})
    line = hashlib.sha256(body).hexdigest().encode() + b"\n"
    (folder / folders.MANIFEST).write_bytes(line + body)


@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_of_another_format_ends_the_job_and_stays_as_it_is(
    tmp_path: Path, number: int
) -> None:
    train(tmp_path, 4)
    for folder in folders.newest_first(tmp_path):
        write_as_format(folder, number)
    before = sorted(os.walk(tmp_path))
    with pytest.raises(UsageError, match=rf"step-000000000004\S* is a .* of format {number}, this"):
        train(tmp_path, 4)
    assert sorted(os.walk(tmp_path)) == before


def test_another_job_that_writes_into_the_same_folder_is_told_of_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs: list[Path] = []
    retire = folders.retire

    def interrupted(root: Path, newest: Path, old: Any) -> None:
        retire(root, newest, old)
        if len(theirs) < 2:  # another job completes one after each of our first ones
            theirs.append(complete_beside(newest, 1000 + len(theirs)))

    monkeypatch.setattr(folders, "retire", interrupted)
    train(tmp_path, 20)
    said = [line for line in capsys.readouterr().err.splitlines() if "another job" in line]
    assert len(said) == 1
    assert "(other)" in said[0]
    assert all(path.is_dir() for path in theirs)
    assert steps(tmp_path) == [16, 18, 20, 1000, 1001]


def complete_beside(ours: Path, version: int) -> Path:
    """Put a complete checkpoint of another run into the folder of this one."""
    folder = ours.with_name(folders.folder_name(version, "1-other"))
    folder.mkdir()
    order = folders.next_order(folders.ages(ours.parent).values())
    manifest = folders.Manifest(version, 1, {}, (), {}, "2", order, run="other")
    folders.complete(folder, manifest)
    return folder
