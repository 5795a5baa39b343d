"""The run's folder: private, found by name, emptied of secrets at the end, refused clearly."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.runtime.run_dir import Endpoint, RunDir, default_state_dir, new_run_id


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_private_even_when_it_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "state" / "run").mkdir(parents=True, mode=0o755)
    run_dir = RunDir(tmp_path / "state", "run")
    run_dir.create()
    assert mode(run_dir.path) == 0o700
    assert [path.name for path in run_dir.path.iterdir()] == ["lock"]


def test_the_endpoint_tells_where_the_driver_is_and_goes_with_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    run_dir.create()
    run_dir.write_endpoint("http://127.0.0.1:4711", now=5.0)
    run_dir.token_file.write_text("secret")
    run_dir.events_file.write_text("{}\n")
    endpoint = msgspec.json.decode(run_dir.endpoint_file.read_bytes(), type=Endpoint)
    assert endpoint == Endpoint(
        run_id="run", url="http://127.0.0.1:4711", pid=os.getpid(), started=5.0
    )
    run_dir.close()
    run_dir.close()
    assert [path.name for path in run_dir.path.iterdir()] == ["events.jsonl"]


def test_a_new_job_of_the_name_begins_without_the_former_one_s_journal_and_secret(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path, "run")
    run_dir.create()
    assert not run_dir.unfinished
    run_dir.leave()
    for path in (run_dir.token_file, run_dir.journal_file, run_dir.events_file):
        path.write_text("former")
    assert run_dir.unfinished
    run_dir.create(anew=False)
    assert run_dir.unfinished
    run_dir.leave()
    run_dir.create()
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["events.jsonl", "lock"]
    run_dir.close()


def test_a_damaged_endpoint_file_stops_nobody(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    run_dir.create()
    run_dir.endpoint_file.write_bytes(b"{half")
    run_dir.create()


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "-x", "a b", "x" * 65, "a\n", "ä"])
def test_a_run_id_that_is_no_folder_s_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UsageError, match="run id"):
        RunDir(tmp_path, run_id)


def test_a_state_folder_that_cannot_be_had_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match="--state-dir") as caught:
        RunDir(tmp_path / "file", "run").create()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EROFS, UsageError), (errno.ENOSPC, ClusterError)]
)
def test_read_only_and_full_disks_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[ElasticError]
) -> None:
    run_dir = RunDir(tmp_path, "run")

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(kind, match="--state-dir"):
        run_dir.create()


def test_the_state_folder_follows_the_xdg_specification() -> None:
    assert default_state_dir({"XDG_STATE_HOME": "/s"}) == Path("/s/elastic-driver")
    home = Path("~/.local/state/elastic-driver").expanduser()
    assert default_state_dir({"XDG_STATE_HOME": "relative"}) == home
    assert default_state_dir({}) == home


def test_run_ids_are_usable_and_differ(tmp_path: Path) -> None:
    ids = {new_run_id(1718000000.0) for _ in range(50)}
    assert len(ids) > 1
    for run_id in ids:
        RunDir(tmp_path, run_id)
