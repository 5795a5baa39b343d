"""Names, completeness, damage and age of checkpoint folders, without a tensor."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import (
    Chunk,
    DamagedError,
    Manifest,
    OtherFormatError,
)


def make(root: Path, version: int, *, complete: bool = True, order: int = 0) -> Path:
    folder = root / folders.folder_name(version, "1-abc")
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"content" * 1000)
    if complete:
        files = {"data": folders.mark_of(folder / "data")}
        folders.complete(folder, Manifest(version, 1, {}, (), files, "2", order))
    return folder


def test_a_complete_checkpoint_is_what_was_written(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    assert folders.verified(folder).version == 7
    assert sorted(p.name for p in folder.iterdir()) == ["data", "manifest.json"], "no rests"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["data", "manifest.json"])
@pytest.mark.parametrize("harm", [flip_a_bit, truncate])
def test_any_change_of_any_file_is_found_and_named(tmp_path: Path, name: str, harm) -> None:
    folder = make(tmp_path, 7)
    harm(folder / name)
    with pytest.raises(DamagedError, match=name):
        folders.verified(folder)


def test_a_missing_file_is_found_and_named(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    (folder / "data").unlink()
    with pytest.raises(DamagedError, match="data is missing"):
        folders.verified(folder)


def test_a_manifest_of_another_folder_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    with pytest.raises(DamagedError, match="not this folder's"):
        folders.verified(folder.rename(tmp_path / folders.folder_name(8, "1-abc")))


def test_a_manifest_never_leads_out_of_its_folder(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    secret = tmp_path / "secret"
    secret.write_text("x")
    mark = folders.mark_of(secret)
    folders.complete(folder, Manifest(7, 1, {}, (), {"../secret": mark}, "2"))
    with pytest.raises(DamagedError, match=r"\.\./secret"):
        folders.verified(folder)
    chunk = Chunk("w", (0,), (1,), "../secret", 0, 1)
    folders.complete(folder, Manifest(7, 1, {}, (chunk,), {}, "2"))
    with pytest.raises(DamagedError, match=r"\.\./secret"):
        folders.verified(folder)


def test_the_highest_step_comes_first_and_strangers_are_left_alone(tmp_path: Path) -> None:
    for version in (9, 100, 20):
        make(tmp_path, version)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-final").mkdir()
    found = folders.checkpoints(tmp_path)
    assert [folders.version_of(path) for path in found] == [100, 20, 9]
    folders.retire(tmp_path, found[0], [found[1].name, found[2].name])
    assert sorted(p.name for p in tmp_path.iterdir())[:2] == ["notes", "step-000000000100-1-abc"]
    assert (tmp_path / "step-final").is_dir()


def test_what_is_named_is_deleted_and_a_newer_half_written_one_stays(tmp_path: Path) -> None:
    made = {version: make(tmp_path, version) for version in (10, 20, 30, 40)}
    make(tmp_path, 25, complete=False)
    newer = make(tmp_path, 50, complete=False)  # somebody may be writing it right now
    folders.retire(tmp_path, made[40], [made[10].name])
    found = [folders.version_of(path) for path in folders.checkpoints(tmp_path)]
    assert found == [50, 40, 30, 20]
    assert not folders.is_complete(newer)


def test_the_one_that_was_written_last_is_the_newest_whatever_its_step(tmp_path: Path) -> None:
    for order, version in enumerate((90, 100, 4, 8), start=1):
        make(tmp_path, version, order=order)
    make(tmp_path, 200, complete=False)
    found = [folders.version_of(path) for path in folders.newest_first(tmp_path)]
    assert found == [8, 4, 100, 90]


def test_an_order_is_above_all_others_though_a_clock_was_set_back(tmp_path: Path) -> None:
    future = 2**53
    make(tmp_path, 10, order=future)
    assert folders.next_order(folders.ages(tmp_path).values()) == future + 1
    assert folders.next_order(()) < future


def test_what_cannot_be_looked_at_is_never_taken_for_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, look = make(tmp_path, 10), Path.stat

    def stat(path: Path, **more: bool) -> os.stat_result:
        if path.parent == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    assert folders.is_complete(folder)
    assert folders.sweep(tmp_path) == []
    assert folder.exists()


@pytest.mark.parametrize("harm", [truncate, lambda path: path.unlink()])
def test_one_that_lacks_a_part_of_a_file_is_not_readable(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    folder = make(tmp_path, 7)
    assert folders.is_readable(folder)
    harm(folder / "data")
    assert not folders.is_readable(folder)


def test_a_checkpoint_of_another_format_is_named_and_is_not_damaged(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    write_as_format(folder, 1)
    with pytest.raises(OtherFormatError, match=r"step-000000000007.* format 1, .* reads format 2"):
        folders.verified(folder)
    assert folders.ages(tmp_path) == {}
    assert not folders.is_readable(folder)


def write_as_format(folder: Path, number: int) -> None:
    """Give a checkpoint the manifest of another format: fields that this one does not have."""
    manifest = {"format": number, "steps": 7, "files": "elsewhere"}
    body = msgspec.json.encode(manifest)
    line = hashlib.sha256(body).hexdigest().encode() + b"\n"
    (folder / folders.MANIFEST).write_bytes(line + body)


def test_one_in_the_way_of_a_new_one_is_renamed(tmp_path: Path) -> None:
    for _ in range(3):
        folder = make(tmp_path, 10)
        folders.make_room(folder)
        assert not folder.exists()
    found = folders.newest_first(tmp_path)
    assert [folders.version_of(path) for path in found] == [10, 10, 10]
    assert all(folders.verified(path).version == 10 for path in found)


def test_a_sweep_deletes_what_is_half_written_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 10)
    half = make(tmp_path, 20, complete=False)
    assert folders.sweep(tmp_path) == [half]
    assert [folders.version_of(path) for path in folders.checkpoints(tmp_path)] == [10]


def test_what_is_deleted_is_incomplete_from_the_first_moment_on(tmp_path: Path) -> None:
    folder = make(tmp_path, 10)
    held = folder / "held"
    held.mkdir()
    (held / "file").write_text("x")
    seen: list[bool] = []
    original = folders.shutil.rmtree

    def interrupted(path: Path) -> None:
        seen.append(folders.is_complete(path))
        raise OSError("interrupted")

    folders.shutil.rmtree = interrupted  # type: ignore[assignment]
    try:
        folders.remove(folder)
    finally:
        folders.shutil.rmtree = original
    assert seen == [False]


def test_a_damaged_one_set_aside_is_no_candidate_any_more(tmp_path: Path) -> None:
    folder = make(tmp_path, 10)
    aside = folders.set_aside(folder)
    assert aside.is_dir()
    assert folders.checkpoints(tmp_path) == []


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


# Whoever opened a pipe waited for its other end, with all ranks of the world.
@pytest.mark.timeout(30, method="thread")
@pytest.mark.parametrize("put", [pipe, endless])
def test_a_pipe_or_a_device_in_a_shared_place_holds_nobody_up(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    good = make(tmp_path, 7, order=7)
    put(tmp_path / folders.folder_name(9, "1-abc"))
    put(tmp_path / folders.roll_call_name("0badcafe"))
    for number, name in ((10, "manifest.json"), (11, "data")):
        put(make(tmp_path, number, order=number) / name)
    assert folders.sweep(tmp_path) == []
    readable = [path for path in folders.newest_first(tmp_path) if folders.is_readable(path)]
    assert readable == [good]
    assert folders.ages(tmp_path).keys() == {good.name, folders.folder_name(11, "1-abc")}
    for number, error in ((10, OSError), (11, OSError)):
        with pytest.raises(error, match="no plain file"):
            folders.verified(tmp_path / folders.folder_name(number, "1-abc"))
    folders.retire(tmp_path, good, [folders.folder_name(9, "1-abc")])
    assert (tmp_path / folders.folder_name(9, "1-abc")).is_fifo() == (put is pipe), "it is not ours"


@pytest.mark.timeout(30, method="thread")
def test_a_pipe_at_the_place_of_a_new_file_is_not_written_to(tmp_path: Path) -> None:
    pipe(tmp_path / "data")
    with pytest.raises(OSError, match=r"no plain file|No such device"):
        folders.new_file(tmp_path / "data")


def test_what_is_behind_a_link_is_never_deleted(tmp_path: Path) -> None:
    """Its manifest was: a link of another user's to any checkpoint of ours was enough."""
    elsewhere = make(tmp_path / "elsewhere", 3)
    root = tmp_path / "shared"
    newest = make(root, 9)
    for link in (root / folders.folder_name(4, "1-def"), root / folders.roll_call_name("0bad")):
        link.symlink_to(elsewhere)
        folders.remove(link)
        assert not link.is_symlink()
        link.symlink_to(elsewhere)
    folders.retire(root, newest, [folders.folder_name(4, "1-def")])
    folders.sweep(root)
    assert folders.verified(elsewhere).version == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a link to somebody else")
def test_a_link_that_another_user_has_made_is_no_checkpoint(tmp_path: Path) -> None:
    elsewhere, root = make(tmp_path / "elsewhere", 3), tmp_path / "shared"
    ours, theirs = root / folders.folder_name(3, "1-abc"), root / folders.folder_name(3, "1-def")
    root.mkdir()
    for link in (ours, theirs):
        link.symlink_to(elsewhere)
    os.chown(theirs, 65534, 65534, follow_symlinks=False)
    assert folders.checkpoints(root) == [ours]
