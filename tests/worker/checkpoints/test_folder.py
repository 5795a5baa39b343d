"""Names, completeness, damage and age of checkpoint folders, without a tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import Chunk, DamagedError, Manifest


def make(root: Path, version: int, *, complete: bool = True, attempt: str = "1-abc") -> Path:
    folder = root / folders.folder_name(version, attempt)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"content" * 1000)
    if complete:
        files = {"data": folders.mark_of(folder / "data")}
        folders.complete(folder, Manifest(version, 1, {}, (), files, "2"))
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
    assert [folders.version_of(path) for path in folders.checkpoints(tmp_path)] == [100, 20, 9]
    folders.retire(tmp_path, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir())[:2] == ["notes", "step-000000000100-1-abc"]
    assert (tmp_path / "step-final").is_dir()


def test_older_ones_are_deleted_and_a_newer_half_written_one_stays(tmp_path: Path) -> None:
    for version in (10, 20, 30, 40):
        make(tmp_path, version)
    make(tmp_path, 25, complete=False)
    newer = make(tmp_path, 50, complete=False)  # somebody may be writing it right now
    folders.retire(tmp_path, keep=3)
    found = [folders.version_of(path) for path in folders.checkpoints(tmp_path)]
    assert found == [50, 40, 30, 20]
    assert not folders.is_complete(newer)


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
