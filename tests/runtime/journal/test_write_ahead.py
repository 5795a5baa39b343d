"""A write-ahead log that has changed on the disk, and one that ends where a driver was killed."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.job import Job
from elastic_driver.runtime.journal import journal_file as store
from elastic_driver.runtime.journal.journal_file import Batch, Head, SqliteStore
from elastic_driver.runtime.journal.replay import JournalError, NotBegunError, Replay, load_run
from elastic_driver.settings import Settings
from tests.runtime.journal.journals import everything

HEADER, FRAME = 32, 24 + 4096
TICK = b"\x81\xa4type\xa4tick"


def write(path: Path, transactions: int, *, begin: int = 0, size: int = 1) -> SqliteStore:
    """Write a journal, and so many transactions of one event each; it stays open."""
    machines = {"job": Job(Settings()), "tf": TfCluster(30.0), "shards": DataSets()}
    database = SqliteStore(path)
    database.open(Head("run", ("elasticrun", "train.py"), "/home"))
    states = [(0, 0.0, name, machine.snapshot()) for name, machine in machines.items()]
    database.write([Batch(0, [], states)])
    add(database, range(1, transactions + 1), size)
    return database


def add(database: SqliteStore, numbers: range, size: int = 1) -> None:
    for n in numbers:
        batch = Batch(n, [(n, float(n), "tf", TICK)], size=size)
        database.write([batch])
        database.tidy([batch])


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The journal of a driver that was killed after 12 events."""
    live = tmp_path / "live" / "journal.db"
    live.parent.mkdir()
    database = write(live, 12)
    yield copy(live, tmp_path / "journal.db")
    database.free()


def copy(live: Path, path: Path) -> Path:
    """Copy a journal as a kill of its driver leaves it."""
    shutil.copy(live, path)
    shutil.copy(log_of(live), log_of(path))
    return path


def last_event(path: Path) -> int:
    found = {load_run(path, alone=alone).n for alone in (True, False)}
    assert len(found) == 1
    return found.pop()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_a_log_that_is_whole_is_read_to_its_end(killed: Path) -> None:
    assert store.log_damage(killed) == ""
    assert last_event(killed) == 12
    assert store.log_damage(killed, indexed=True) == ""


def test_a_byte_that_changes_anywhere_in_the_log_is_refused(killed: Path) -> None:
    log = log_of(killed)
    content = log.read_bytes()
    frames = (len(content) - HEADER) // FRAME
    assert len(content) == HEADER + frames * FRAME
    inside = [random.Random(3).randrange(24, FRAME) for _ in range(4)]
    of_a_frame = [0, 4, *range(8, 24, 3), *inside, FRAME - 1]
    places = [HEADER + n * FRAME + at for n in (0, 1, frames // 2, frames - 1) for at in of_a_frame]
    for at in (0, 3, 9, 17, 22, 25, 31, *places):
        flip(log, at)
        damaged = log.read_bytes()
        for alone in (True, False):
            with pytest.raises(JournalError, match=r"damaged: .*write-ahead log") as told:
                load_run(killed, alone=alone)
            assert not isinstance(told.value, NotBegunError), at
            assert "\n" not in str(told.value)
        with pytest.raises(JournalError, match="the journal is damaged"):
            everything(killed)
        assert log.read_bytes() == damaged, "nothing was changed"
        log.write_bytes(content)
    assert last_event(killed) == 12


def test_what_was_before_the_damage_can_still_be_looked_at(killed: Path) -> None:
    frames = (log_of(killed).stat().st_size - HEADER) // FRAME
    flip(log_of(killed), HEADER + (frames - 1) * FRAME + 1000)
    found = []
    with contextlib.closing(Replay(killed)) as replay, pytest.raises(JournalError, match="damaged"):
        found.extend(step.n for step in replay.steps())
    assert found == list(range(1, 12))
    with contextlib.closing(Replay(killed)) as replay:
        assert [step.n for step in replay.steps(until=5)] == list(range(1, 6))


@pytest.mark.parametrize("left", [0, 1, 10, 23, 24, 25, 2000, FRAME - 1])
def test_a_frame_in_which_the_driver_was_killed_is_no_damage(killed: Path, left: int) -> None:
    log = log_of(killed)
    content = log.read_bytes()
    log.write_bytes(content[: len(content) - FRAME + left])
    assert last_event(killed) == 11


def test_a_transaction_that_was_not_committed_is_no_damage(tmp_path: Path) -> None:
    live = tmp_path / "live.db"
    database = write(live, 12)
    before = log_of(live).stat().st_size
    large = [(n, float(n), "tf", TICK + bytes(20_000)) for n in (13, 14)]
    database.write([Batch(13, large)])
    path = copy(live, tmp_path / "journal.db")
    content = log_of(path).read_bytes()
    assert len(content) > before + 4 * FRAME
    log_of(path).write_bytes(content[: before + 3 * FRAME])
    assert last_event(path) == 12
    database.free()


def test_a_log_that_was_begun_anew_ends_where_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECKPOINT_BYTES", 8)
    live, path = tmp_path / "live.db", tmp_path / "journal.db"
    database = write(live, 9)
    assert log_of(live).stat().st_size > HEADER + 8 * FRAME
    add(database, range(10, 12))  # the ninth event has moved the log into the file
    assert log_of(live).stat().st_size < HEADER + 8 * FRAME
    frames = (log_of(copy(live, path)).stat().st_size - HEADER) // FRAME
    assert last_event(path) == 11
    for frame in range(frames):
        copy(live, path)
        flip(log_of(path), HEADER + frame * FRAME + 100)
        with pytest.raises(JournalError, match="damaged"):
            load_run(path, alone=True)
    database.free()


def test_the_rest_of_an_earlier_log_is_no_damage(tmp_path: Path) -> None:
    live, path = tmp_path / "live.db", tmp_path / "journal.db"
    write(live, 12).free()
    with contextlib.closing(sqlite3.connect(live, isolation_level=None)) as database:
        database.executescript("PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0")
        for n in range(6):
            database.execute("INSERT INTO keys VALUES (?, x'00', 0)", (f"a{n}",))
        database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        database.execute("DELETE FROM keys")
        before = log_of(live).stat().st_size
        copy(live, path)
        assert log_of(path).stat().st_size == before > HEADER + 5 * FRAME, "the rest is behind it"
        assert store.log_damage(path) == ""
        assert last_event(path) == 12
        flip(log_of(path), HEADER + 3 * FRAME + 50)  # nothing of it counts
        assert last_event(path) == 12


def test_a_machine_that_lost_power_may_lack_the_end(killed: Path) -> None:
    frames = (log_of(killed).stat().st_size - HEADER) // FRAME
    flip(log_of(killed), HEADER + (frames - 2) * FRAME + 1000)
    with pytest.raises(JournalError, match="damaged"):
        load_run(killed)
    assert load_run(killed, may_be_torn=True).n == 10


def test_a_log_that_cannot_be_read_is_one_line(killed: Path) -> None:
    log_of(killed).unlink()
    log_of(killed).mkdir()
    with pytest.raises(JournalError) as told:
        load_run(killed)
    assert "\n" not in str(told.value)


def test_bits_that_flip_anywhere_in_both_files_change_no_resume(tmp_path: Path) -> None:
    live, path = tmp_path / "live.db", tmp_path / "journal.db"
    database = write(live, 20)
    database._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
    add(database, range(21, 40))
    copy(live, path)
    told, choice, refused = everything(path), random.Random(7), 0
    for _ in range(200):
        copy(live, path)
        path.with_name("journal.db-shm").unlink(missing_ok=True)
        file = choice.choice([path, log_of(path)])
        content = bytearray(file.read_bytes())
        bit = choice.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        try:
            assert load_run(path, alone=True).n == 39, f"bit {bit} of {file.name}"
            assert everything(path) == told, f"bit {bit} of {file.name}"
        except JournalError:
            refused += 1
    assert refused > 50
    database.free()


def test_a_log_that_is_being_written_is_never_taken_for_damaged(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    code = (
        "from pathlib import Path; "
        "from elastic_driver.runtime.journal import journal_file as store; "
        "from tests.runtime.journal.test_write_ahead import add, write; "
        "store.CHECKPOINT_BYTES = 30; "
        f"database = write(Path({str(path)!r}), 1); print('begun', flush=True); "
        "add(database, range(2, 2000)); print('done')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        looks = 0
        while writer.poll() is None:
            assert store.log_damage(path) == ""
            looks += 1
        assert looks > 20
        assert writer.stdout.read() == b"done\n"
