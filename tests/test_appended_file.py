"""A log file may be moved while it is written: nothing is lost, and nobody has to be told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elastic_driver.line_writer import LOOK_S, AppendedFile


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a link away needs root")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "log"
    precious.write_text("precious")
    path.symlink_to(precious)
    AppendedFile(path).close()  # our own link
    os.chown(path, 12345, 12345, follow_symlinks=False)
    with pytest.raises(PermissionError, match="it is a link that user 12345 has made"):
        AppendedFile(path)
    assert precious.read_text() == "precious"


def test_a_moved_file_is_made_again(tmp_path: Path) -> None:
    clock, path, moved = FakeClock(), tmp_path / "log", tmp_path / "log.1"
    file = AppendedFile(path, clock)
    file.current().write(b"1")
    path.rename(moved)
    clock.advance(LOOK_S / 2)
    file.current().write(b"2")
    clock.advance(LOOK_S / 2)
    file.current().write(b"3")
    file.current().write(b"4")
    assert (moved.read_bytes(), path.read_bytes()) == (b"12", b"34")
    file.close()
    clock.advance(LOOK_S)
    assert file.current().closed


def test_a_file_that_another_program_has_made_is_appended_to(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "log"
    file = AppendedFile(path, clock)
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"made by logrotate\n")
    clock.advance(LOOK_S)
    file.current().write(b"1")
    file.close()
    assert path.read_bytes() == b"made by logrotate\n1"


def test_what_cannot_be_made_again_goes_to_the_moved_file(tmp_path: Path) -> None:
    clock, folder = FakeClock(), tmp_path / "folder"
    folder.mkdir()
    file = AppendedFile(folder / "log", clock)
    shutil.move(folder, tmp_path / "away")
    clock.advance(LOOK_S)
    file.current().write(b"1")
    file.close()
    assert (tmp_path / "away" / "log").read_bytes() == b"1"
