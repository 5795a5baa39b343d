"""Folders and files that other users can have made or changed are refused."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rendezvous.auth import read_credentials, write_token_file
from rendezvous.errors import TokenError
from rendezvous.own_files import open_named, open_own, own_folder, read_own, shown_folder, write_own

STRANGER = 12345
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")


def test_a_folder_is_made_for_this_user_alone_and_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "above" / "run"
    own_folder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "file").write_text("ours")
    path.chmod(0o755)
    own_folder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (path / "file").read_text() == "ours"


def test_a_folder_of_results_is_for_others_to_look_into_only(tmp_path: Path) -> None:
    path = tmp_path / "results"
    before = os.umask(0o002)
    try:
        shown_folder(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    path.chmod(0o2777)
    shown_folder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o2755
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(PermissionError, match="it is a link"):
        shown_folder(tmp_path / "link")
    assert list(path.iterdir()) == []


@is_root
def test_a_file_server_that_knows_us_by_another_number_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results"
    shown_folder(path)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    shown_folder(path)  # what this process makes there is root's, too
    os.chown(path, STRANGER + 1, -1)
    with pytest.raises(PermissionError, match=f"it belongs to user {STRANGER + 1}"):
        shown_folder(path)
    assert list(path.iterdir()) == []


def test_a_plain_file_of_some_size_is_read_and_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_own(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        read_own(tmp_path / "file", 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError, match="it is no plain file"):
        read_own(tmp_path / "pipe", 5)


def _writable(path: Path) -> None:
    path.chmod(0o777)


def _link_inside(path: Path) -> None:
    (path / "lock").symlink_to(path.parent / "precious")


def _is_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_writable, "other users may write to it (mode 0777)"),
        (_link_inside, "'lock' in it is a link"),
        (_is_link, "it is a link"),
    ],
)
def test_a_folder_that_others_can_have_changed_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "run"
    own_folder(path)
    spoil(path)
    with pytest.raises(PermissionError) as refused:
        own_folder(path)
    assert why in str(refused.value)


@is_root
def test_a_folder_of_another_user_or_with_a_file_of_theirs_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    own_folder(theirs)
    os.chown(theirs, STRANGER, -1)
    with pytest.raises(PermissionError, match=f"it belongs to user {STRANGER}"):
        own_folder(theirs)
    ours = tmp_path / "ours"
    own_folder(ours)
    (ours / "events.jsonl").touch()
    os.chown(ours / "events.jsonl", STRANGER, -1)
    with pytest.raises(PermissionError, match=f"'events.jsonl' in it belongs to user {STRANGER}"):
        own_folder(ours)


def test_writing_replaces_a_link_and_leaves_what_it_led_to(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "history"
    precious.write_text("precious")
    path.symlink_to(precious)
    write_own(path, b"new")
    assert path.read_bytes() == b"new"
    assert not path.is_symlink()
    assert precious.read_text() == "precious"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@is_root
def test_a_token_behind_a_link_of_another_user_is_not_read(tmp_path: Path) -> None:
    path, link = tmp_path / "token", tmp_path / "link"
    write_token_file(path, "secret")
    link.symlink_to(path)
    assert read_credentials(link).token == "secret"  # as secrets are mounted into containers
    os.lchown(link, STRANGER, -1)
    with pytest.raises(PermissionError, match=f"a link that user {STRANGER} has made"):
        open_own(link, os.O_RDONLY)
    with pytest.raises(TokenError, match=f"a link that user {STRANGER} has made"):
        read_credentials(link)


@pytest.mark.timeout(30, method="thread")
@is_root
@pytest.mark.parametrize("what", ["pipe", "pipe that is read", "link", "device"])
def test_a_file_that_the_user_has_named_is_not_one_that_others_have_prepared(
    tmp_path: Path, what: str
) -> None:
    named, other = tmp_path / "page.html", tmp_path / "other"
    reader = None
    if what == "link":
        named.symlink_to(other)
    elif what == "device":
        os.mknod(named, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    else:
        os.mkfifo(named)
        reader = os.open(named, os.O_RDONLY | os.O_NONBLOCK) if "read" in what else None
    os.chown(named, 65534, 65534, follow_symlinks=False)
    with pytest.raises(OSError, match=r"user 65534|No such device"):
        open_named(named)
    assert not other.exists()
    if reader is not None:
        os.close(reader)


@pytest.mark.timeout(30, method="thread")
def test_a_file_that_the_user_has_named_may_be_anything_of_his(tmp_path: Path) -> None:
    plain, link, pipe = tmp_path / "plain", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(plain)
    os.mkfifo(pipe)
    for path in (plain, link):
        with open(open_named(path), "wb") as file:
            file.write(path.name.encode())
        assert plain.read_text() == path.name
    assert stat.S_IMODE(plain.stat().st_mode) == 0o666 & ~umask()
    for path in (Path("/dev/null"), Path("/dev/stderr")):
        os.close(open_named(path))
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with open(open_named(pipe), "wb") as file:
        file.write(b"x" * 200_000)
    reader.join(30)
    assert read == [b"x" * 200_000]


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now
