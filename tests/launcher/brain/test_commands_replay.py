"""`elasticbrain replay` with databases of both kinds, and an algorithm of another package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("scipy")

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import FINE, JobKey, Node, Record, Row, Series, Summary
from elastic_driver.errors import UsageError
from launcher.brain.command import parser
from launcher.brain.commands import run_replay

_ALGORITHMS = """
from elastic_driver.brain.algorithm import Plan

def single(view):
    slots = [host.name for host in view.hosts for _ in range(host.slots)]
    workers = {job.name: {host: 1} for job, host in zip(view.jobs, slots)}
    return Plan(workers=workers, reason="one each")

def whole(view):
    workers = {job.name: {host.name: host.slots} for job, host in zip(view.jobs, view.hosts)}
    return Plan(workers=workers, reason="a host each")

def broken(view):
    raise KeyError("no such job")

def nothing(view):
    return None
"""
_ENTRY_POINTS = """[elastic_driver.algorithms]
single = my_shares:single
whole = my_shares:whole
broken = my_shares:broken
nothing = my_shares:nothing
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "site"
    information = folder / "my_shares-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "my_shares.py").write_text(_ALGORITHMS)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-shares\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("my_shares", None)


def record_jobs(address: Address) -> None:
    """Two jobs of 100 s with 2 workers; the first one counts samples. A third was not measured."""
    database = Database(address)
    speeds = tuple(SpeedAt(size=n, hosts=1, step_time=t) for n, t in ((1, 1.0), (2, 1.25)))
    for number, name in enumerate(("first", "second")):
        began = 1000.0 * number
        rows = [
            Row(Series("job", figure), int(began) + t, Summary(5, value, value, value))
            for t in range(0, 100, FINE)
            for figure, value in (("workers", 2.0), ("steps_per_s", 0.8), ("samples_per_s", 16.0))
            if figure != "samples_per_s" or not number
        ]
        key = JobKey(name, began)
        database.write(key, rows)
        database.roll_up(key, None)
        kind = Kind(name=name, command="c")
        database.remember(key, Record(kind, speeds=speeds, ended=began + 100.0, exit_code=0))
    database.remember(JobKey("third", 5.0), Record(Kind(name="third", command="c"), ended=9.0))
    database.close()


def play(*words: str) -> int:
    return run_replay(parser().parse_args(["replay", *words]))


def test_the_same_input_gives_the_same_bytes_from_both_databases(
    in_file: Address, in_postgres: Address, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = set()
    for address, url in ((in_file, in_file.file), (in_postgres, in_postgres.url)):
        record_jobs(address)
        for _ in range(2):
            words = "--algorithm", "single", "--against", "whole", "--stats-db", url
            assert play(*words, "-H", "n1:2,n2:2") == 0
            texts.add(capsys.readouterr().out)
    (text,) = texts
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("2 jobs on 4 slots (n1:2, n2:2)\n")
    # A job trains 0.8 steps of 2 batches per second, of 10 samples each; one worker alone 1.
    assert lines[3] == ["first", "samples", "1600", "1600", "997", "1595"]
    assert lines[4] == ["second", "batches", "160", "160", "100", "160"]
    assert "single: 62.3% of recorded, 62.3% of best possible" in text
    assert "left out, not measured or not ended: third" in text


def test_the_hosts_are_those_that_the_monitor_has_seen(
    in_file: Address, capsys: pytest.CaptureFixture[str]
) -> None:
    record_jobs(in_file)
    words = "--algorithm", "single", "--against", "whole", "--stats-db", in_file.file
    with pytest.raises(UsageError, match="knows no hosts; name them with -H"):
        play(*words)
    database = Database(in_file)
    database.put_nodes([Node("n1", 5.0, slots=2), Node("n2", 5.0, slots=0), Node("n3", 5.0)])
    database.close()
    assert play(*words) == 0
    assert "2 jobs on 2 slots (n1:2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("broken", r"the algorithm broken raised KeyError: 'no such job'; mend it"),
        ("nothing", r"the algorithm nothing returned no Plan; mend it"),
        ("singel", r"--algorithm singel: did you mean single\?"),
    ],
)
def test_an_algorithm_that_cannot_be_played_is_named(
    in_file: Address, algorithm: str, said: str
) -> None:
    record_jobs(in_file)
    with pytest.raises(UsageError, match=said):
        play("--against", algorithm, "--algorithm", "single", "--stats-db", in_file.file,
             "-H", "n1:2")  # fmt: skip


def test_a_database_without_jobs_and_a_missing_file_are_usage_errors(in_file: Address) -> None:
    words = "--algorithm", "single", "--against", "whole", "-H", "n1:2", "--stats-db"
    with pytest.raises(UsageError, match="there is no such file"):
        play(*words, in_file.file)
    assert not Path(in_file.file).exists(), "nothing is made"
    with pytest.raises(UsageError, match="--stats-db is postgresql://"):
        play(*words, "mysql://h/d")
    database = Database(in_file)
    database.open()
    database.close()
    with pytest.raises(UsageError, match="has no job that has ended and was measured"):
        play(*words, in_file.file)
