from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from elastic_driver.words.orders import JobSpec
from launcher.agent.output import ERR, OUT, LogFile, Routing, link_ranks, parse_streams, route

SPEC = JobSpec("r", ("x",), "/", {}, 1.0, 0, log_dir="logs", redirects="0", tee="0")
BOTH = OUT | ERR


def routed(local_rank: int = 0, **changes: object) -> Routing:
    return route(dataclasses.replace(SPEC, **changes), local_rank)


@pytest.mark.parametrize(
    ("redirects", "tee", "to_file", "to_console"),
    [
        ("0", "0", 0, BOTH),
        ("3", "0", BOTH, 0),
        ("0", "3", BOTH, BOTH),
        ("3", "2", BOTH, ERR),
        ("1", "0", OUT, ERR),
        ("1:3", "0", 0, BOTH),
        ("0:3,1:1", "0", BOTH, 0),
    ],
)
def test_redirects_and_tee_mean_what_torchrun_means(
    redirects: str, tee: str, to_file: int, to_console: int
) -> None:
    assert routed(redirects=redirects, tee=tee) == Routing(to_file, to_console)


@pytest.mark.parametrize(
    ("redirects", "to_console"), [("0", BOTH), ("1", ERR), ("3", 0), ("1:3", BOTH)]
)
def test_all_streams_go_to_files_and_those_that_are_not_redirected_to_the_terminal(
    redirects: str, to_console: int
) -> None:
    assert routed(redirects=redirects, tee=None) == Routing(BOTH, to_console)


def test_without_a_log_directory_nothing_is_kept_from_the_terminal() -> None:
    assert routed(log_dir=None, redirects="3", tee="3") == Routing(0, BOTH)


def test_the_filter_keeps_other_local_ranks_from_the_terminal_but_not_from_files() -> None:
    assert routed(0, tee="3", local_ranks_filter=(1,)) == Routing(BOTH, 0)
    assert routed(1, tee="3", local_ranks_filter=(1,)) == Routing(BOTH, BOTH)


@pytest.mark.parametrize("text", ["4", "x", "0:9", "-1", ""])
def test_a_wrong_stream_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_streams(text, 0)


def test_a_file_keeps_bytes_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.log"
    for part in (b"\xff\x00one", b"two\r"):
        file = LogFile(path)
        assert file.write(part) is None
        file.close()
        file.close()
    assert path.read_bytes() == b"\xff\x00onetwo\r"


def test_a_full_disk_is_said_once_and_ends_the_file_only() -> None:
    file = LogFile(Path("/dev/full"))
    assert "No space left" in (file.write(b"x") or "")
    assert file.write(b"y") is None


def test_links_lead_to_the_workers_folder_and_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "h.0.1").mkdir()
    (tmp_path / "h.0.1" / "stdout.log").write_text("here")
    link_ranks(tmp_path, 2, {"h.0.2": 0})
    link_ranks(tmp_path, 2, {"h.0.1": 0})
    assert (tmp_path / "by-rank" / "2" / "0" / "stdout.log").read_text() == "here"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
@pytest.mark.parametrize("link", [False, True])
def test_what_another_user_has_prepared_among_the_files_is_not_written_to(
    tmp_path: Path, link: bool
) -> None:
    precious, logs = tmp_path / "precious", tmp_path / "logs"
    for place in (logs / "h.0.1", logs / "by-rank"):
        precious.mkdir(exist_ok=True)
        place.parent.mkdir(exist_ok=True)
        if link:
            place.symlink_to(precious)
        else:
            place.mkdir(0o777)
        os.chown(place, 12345, 12345, follow_symlinks=False)
    why = "it is a link" if link else "it belongs to user 12345"
    with pytest.raises(PermissionError, match=why):
        LogFile(logs / "h.0.1" / "stdout.log")
    with pytest.raises(PermissionError, match=why):
        link_ranks(logs, 2, {"h.0.1": 0})
    assert list(precious.iterdir()) == []
