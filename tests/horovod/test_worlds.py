"""Worlds of Horovod's scripts: repeated ones, static ones that lose a worker, and elastic ones."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import Hosts, RunningJob, elasticrun

JOBS = Path(__file__).with_name("jobs")
pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank


def test_a_hundred_worlds_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "seconds"
    with elasticrun("-np", "2", "--", str(JOBS / "cycles.py"), str(file), "100") as job:
        assert job.wait(within=200) == 0, job.describe()
        assert len(job.rounds()) <= 1
        assert "gloo" not in job.stderr.lower()
        assert "error" not in job.stderr.lower()
    assert float(file.read_text()) < 10


def test_a_static_script_is_restarted_together_after_a_loss(tmp_path: Path) -> None:
    first, second = ([tmp_path / f"{restart}.{rank}" for rank in (0, 1)] for restart in (0, 1))
    with elasticrun("-np", "2", "--", str(JOBS / "static.py"), str(tmp_path)) as job:
        job.until(lambda: all(map(Path.exists, first)), "both train", within=90)
        os.kill(int(first[1].read_text()), signal.SIGKILL)
        assert job.wait(within=120) == 0, job.describe()
    assert not {file.read_text() for file in first} & {file.read_text() for file in second}


def written(folder: Path, name: str) -> dict[int, list[dict[str, Any]]]:
    """What each process wrote under this name, by pid."""
    found = {}
    for path in folder.glob(f"*.{name}"):
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if whole:
            found[int(path.name.partition(".")[0])] = [json.loads(line) for line in whole]
    return found


def steps_of(folder: Path) -> int:
    """The newest step of any process."""
    records = written(folder, "steps").values()
    return max((each["step"] for steps in records for each in steps), default=0)


def start(tmp_path: Path, job: RunningJob, step: int) -> None:
    job.until(lambda: steps_of(tmp_path) >= step, f"step {step}", within=120)


def test_survivors_of_a_loss_go_on_from_the_last_commit(tmp_path: Path) -> None:
    script = JOBS / "elastic.py"
    with elasticrun("-np", "2", "--min-np", "1", "--", str(script), str(tmp_path), "0.02") as job:
        start(tmp_path, job, 20)
        ranks = {facts[-1]["rank"]: pid for pid, facts in written(tmp_path, "entered").items()}
        os.kill(ranks[1], signal.SIGKILL)
        job.until(lambda: len(written(tmp_path, "entered")) == 3, "a newcomer trains", within=90)
        (tmp_path / "stop").touch()
        assert job.wait(within=60) == 0, job.describe()
    survivor, entered = ranks[0], written(tmp_path, "entered")
    (newcomer,) = set(entered) - set(ranks.values())
    # The loss, the newcomer: each is a world, and the survivor has been in all of them.
    assert [each["size"] for each in entered[survivor]] == [2, 1, 2]
    assert entered[survivor][1]["step"] % 5 == 0
    assert entered[survivor][2]["resets"] == 2
    joined = entered[newcomer][0]
    assert joined["took"] < 2
    assert joined["step"] == entered[survivor][2]["step"] > 0
    assert f"{script}:" in joined["early"]
    assert "hvd.elastic.run" in joined["early"]
    ends = written(tmp_path, "done")
    assert ends.keys() == {survivor, newcomer}
    assert len({facts[-1]["step"] for facts in ends.values()}) == 1


@pytest.mark.parametrize(
    ("lost", "late"),
    [
        pytest.param((1, 2, 3), "0,1,0.5,0", id="all but one, the last comes first"),
        pytest.param((0, 1, 2, 3), "0.5,0,1,0", id="all"),
    ],
)
def test_newcomers_have_the_ranks_that_they_were_told(
    tmp_path: Path, lost: tuple[int, ...], late: str
) -> None:
    options = ["-np", "4", "--min-np", "1", "--restart-from-scratch"]
    command = [*options, "--", str(JOBS / "elastic.py"), str(tmp_path), "0.02"]
    with elasticrun(*command, env={"LATE": late}) as job:
        start(tmp_path, job, 10)
        ranks = {facts[-1]["rank"]: pid for pid, facts in written(tmp_path, "entered").items()}
        for rank in lost:
            os.kill(ranks[rank], signal.SIGKILL)
        job.until(lambda: len(written(tmp_path, "entered")) == 4 + len(lost), "all are back", 90)
        (tmp_path / "stop").touch()
        assert job.wait(within=60) == 0, job.describe()
    entered = written(tmp_path, "entered")
    newcomers = [facts[0] for pid, facts in entered.items() if pid not in ranks.values()]
    assert sorted(each["told"][0] for each in newcomers) == [*lost]
    assert [each["rank"] for each in newcomers] == [each["told"][0] for each in newcomers]


def test_a_newcomer_with_another_place_than_told_runs_its_reset_callbacks(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1")
    options = ["--host-discovery-script", str(hosts.script), "-np", "1", "--max-np", "3"]
    with elasticrun(*options, "--", str(JOBS / "elastic.py"), str(tmp_path), "0.02") as job:
        start(tmp_path, job, 10)
        hosts.set("localhost:1", "127.0.0.2:2")  # the first of the two may be in a world of two
        job.until(lambda: 3 in job.rounds(), "three workers train", within=90)
        (tmp_path / "stop").touch()
        assert job.wait(within=60) == 0, job.describe()
    for pid, entered in written(tmp_path, "entered").items():
        first = entered[0]
        moved = first["told"] != [first["rank"], first["size"]]
        assert first["resets"] == int(moved), (pid, first)


@pytest.mark.parametrize("kind", ["alone", "more"])
def test_states_of_the_script_s_own_follow_every_change(tmp_path: Path, kind: str) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    options = ["--host-discovery-script", str(hosts.script), "-np", "2", "--max-np", "3"]
    command = [*options, "--min-np", "1", "--", str(JOBS / "own_states.py"), str(tmp_path), kind]
    with elasticrun(*command) as job:
        job.until(lambda: len(written(tmp_path, "entered")) == 2, "two train", within=90)
        hosts.set("localhost:3")
        job.until(lambda: job.rounds()[-1:] == [3], "three train", within=90)
        job.until(lambda: len(written(tmp_path, "entered")) == 3, "a newcomer trains", within=30)
        ranks = {facts[-1]["rank"]: pid for pid, facts in written(tmp_path, "entered").items()}
        os.kill(ranks[0], signal.SIGKILL)
        job.until(lambda: job.rounds()[-2:] == [2, 3], "a newcomer has its place", within=90)
        job.until(lambda: len(written(tmp_path, "entered")) == 4, "it trains", within=30)
        (tmp_path / "stop").touch()
        assert job.wait(within=60) == 0, job.describe()
        assert "an error of the script there" in job.stderr
    by_world: dict[int, set[int]] = {}
    entered = written(tmp_path, "entered")
    del entered[ranks[0]]
    for facts in entered.values():
        for number, each in enumerate(reversed(facts)):
            by_world.setdefault(-number, set()).add(each["step"])
    assert all(len(steps) == 1 for steps in by_world.values()), by_world
    assert min(by_world[0]) > 0
    assert len({facts[0]["step"] for facts in written(tmp_path, "done").values()}) == 1
    told = written(tmp_path, "told")[ranks[1]]
    # Of both newcomers, while it was in its first world, and in the one after the loss.
    assert [(each["change"], each["entered"]) for each in told] == [(3, 1), (3, 3)], told
    assert all(0 <= each["ago"] < 1 for each in told)


@pytest.mark.parametrize("mode", ["check", "commit"])
def test_a_change_is_followed_at_the_next_check_or_commit(tmp_path: Path, mode: str) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    options = ["--host-discovery-script", str(hosts.script), "-np", "2", "--max-np", "3"]
    with elasticrun(*options, "--", str(JOBS / "follows.py"), str(tmp_path), mode) as job:
        job.until(lambda: job.rounds() == [2], "two train", within=90)
        hosts.set("localhost:3")
        job.until(lambda: len(job.events("worker_ready")) == 3, "a newcomer is ready", within=90)
        (tmp_path / "ready").touch()
        assert job.wait(within=60) == 0, job.describe()
        assert job.rounds() == [2, 3]
        assert all(each.get("undone") is None for each in job.events("worker_ready"))
    left = [path.read_text() for path in tmp_path.glob("*.left")]
    entered = [path.read_text() for path in tmp_path.glob("*.entered")]
    assert len(left) == 2
    assert len(entered) == 3
    assert len({*left, *entered}) == 1


def test_a_script_that_waits_for_a_change_is_in_the_next_world_after_one_commit(
    tmp_path: Path,
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    options = ["--host-discovery-script", str(hosts.script), "-np", "2", "--max-np", "3"]
    with elasticrun(*options, "--", str(JOBS / "waits.py"), str(tmp_path)) as job:
        job.until((tmp_path / "waits").exists, "rank 0 waits", within=90)
        hosts.set("localhost:2", "127.0.0.2:1")
        assert job.wait(within=60) == 0, job.describe()
    entered = sorted(path.read_text() for path in tmp_path.glob("*.entered"))
    assert entered == ["0 2\n10 3\n", "0 2\n10 3\n", "10 3\n"]
