"""Journals of earlier versions are read, and their jobs go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_driver.runtime.journal.journal_file import checksum, connect
from elastic_driver.runtime.journal.replay import JournalError
from tests.runtime.journal import versions

KEPT = sorted((Path(__file__).parent / "kept").iterdir())


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
@pytest.mark.parametrize("from_newest", [False, True])
def test_the_job_of_an_earlier_version_is_known_and_goes_on(
    folder: Path, from_newest: bool, tmp_path: Path
) -> None:
    shutil.copy(folder / versions.NAME, tmp_path)
    found = versions.known(tmp_path / versions.NAME, from_newest=from_newest)
    expected = json.loads((folder / "known.json").read_text())
    expected["decided"] = expected["decided"][-len(found["decided"]) :]
    assert _of_then(found, expected) == expected
    assert len(found["decided"]) > 3
    assert {each["type"] for each in found["resumed"]} > {"announce", "publish_world"}


def test_this_version_writes_and_reads_such_a_journal(tmp_path: Path) -> None:
    path = tmp_path / versions.NAME
    versions.write(path)
    whole = versions.known(path)
    newest = versions.known(path, from_newest=True)
    assert {**whole, "decided": []} == {**newest, "decided": []}


def test_a_snapshot_without_a_field_of_this_version_is_the_same_state(tmp_path: Path) -> None:
    """It was written by a version that had no such field; the state beside it has its default."""
    path = tmp_path / versions.NAME
    versions.write(path)
    with_less, changed = _changed(path, lambda tables: tables["unanswered"].clear())
    assert changed
    assert versions.known(with_less) == versions.known(path)
    with_other, _ = _changed(path, lambda tables: tables["rounds"]["current"].update(number=77))
    with pytest.raises(JournalError, match="job is another one after event"):
        versions.known(with_other)


def _of_then(found: Any, expected: Any) -> Any:
    """Return what was found without the fields that the earlier version did not have."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {name: _of_then(found[name], expected[name]) for name in expected if name in found}
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [_of_then(*pair) for pair in zip(found, expected, strict=True)]
    return found


def _changed(path: Path, change: Any) -> tuple[Path, bool]:
    """Return a copy of a journal whose last snapshot of the job is changed, and whether it is."""
    copy = path.with_name("changed.db")
    shutil.copy(path, copy)
    database = connect(copy)
    n, at, name, state = database.execute(
        "SELECT n, at, machine, state FROM snapshots WHERE machine = 'job' ORDER BY n DESC"
    ).fetchone()
    form = msgspec.msgpack.decode(state)
    change(form[3])
    after = msgspec.msgpack.encode(form)
    row = after, checksum(n, at, name, after), n
    database.execute("UPDATE snapshots SET state = ?, sum = ? WHERE n = ? AND machine = 'job'", row)
    database.commit()
    database.close()
    return copy, after != state
