"""What people see of a job."""

from __future__ import annotations

import msgspec
import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.job.events import AgentHeard, AgentSuspected
from elastic_driver.runtime.results import JobResult, WorkerResult
from elastic_driver.words import wire_events as ev
from elastic_driver.words.findings import Failure
from launcher import readable as figures
from launcher.ctl_commands import job_text as show
from tests.job.scenario import Scenario


def document(s: Scenario) -> show.JobDocument:
    """A job's status as the driver sends it."""
    told = {"run_id": "r1", "endpoint": "http://127.0.0.1:5", "started": 1000.0}
    picture = msgspec.to_builtins(s.job.status(s.now))
    return show.read_job(msgspec.json.encode({**told, **picture}))


def test_a_job_is_shown_with_its_hosts_and_workers() -> None:
    s = Scenario(start_np=3, min_np=1, max_restarts=5).training(a=2, b=1)
    s.send(ev.DrainRequested("b", "new disks"))
    lines = show.job(document(s), 1000.0 + 3725).splitlines()
    assert lines[:3] == [
        "run r1 at http://127.0.0.1:5",
        "running for 1 h 2 min, round 1: 3 workers (any wanted, 1 to any) for 0 s",
        "failures 0 of 5, changes 0",
    ]
    assert lines[3].startswith("now: change is coming: host b is drained: new disks")
    assert [line.split()[:4] for line in lines if line.startswith(("a ", "b "))] == [
        ["a", "usable", "2", "2"],
        ["b", "draining", "1", "1"],
    ]
    ranks = [line for line in lines if line[:1].isdigit()]
    assert [line.split()[0] for line in ranks] == ["0", "1", "2"]
    assert "leaves: host b is drained: new disks" in ranks[2]


def test_workers_whose_scripts_are_over_are_counted_apart() -> None:
    s = Scenario(start_np=2).training(a=2)
    s.send(ev.WorkerEnding("a.0.1", 1))
    assert "round 1: 1 worker and 1 ending (any wanted" in show.job(document(s), 1000.0)


def test_a_hung_worker_is_called_so_in_the_table() -> None:
    ends = [("a.0.1", 0, -9, True), ("a.1.1", 1, None, False), ("a.2.1", 2, -15, False)]
    workers = tuple(
        WorkerResult(
            worker=worker,
            host="a",
            slot=rank,
            rank=rank,
            pid=7,
            exit_code=code,
            reason="",
            ended=1.0,
            seconds=4.0,
            hung=hung,
        )
        for worker, rank, code, hung in ends
    )
    result = JobResult(exit_code=137, reason="why", ended=10.0, workers=workers)
    rows = show.ended(result, 12.0).splitlines()[3:]
    assert [row.split()[5] for row in rows] == ["hung", "lost", "-15"]


def test_a_script_s_own_status_of_a_stop_is_a_failure() -> None:
    failure = Failure("a.0.1", 0, "a", 7, 130)
    result = JobResult(exit_code=130, reason="why", ended=10.0, failure=failure)
    assert show.ended(result, 12.0).startswith("failed 2 s ago (status 130): why")


def test_one_rank_is_no_range_and_one_worker_no_workers() -> None:
    assert show._more(show.MOST_ODD + 1, "worker").startswith("\n… and 1 more worker; --all")
    assert show._more(show.MOST_ODD, "worker") == ""
    s = Scenario(start_np=51).training(a=50, b=1)
    rows = show.workers_by_host(document(s)).splitlines()
    assert [row.split()[2] for row in rows[1:]] == ["0-49", "50"]


def test_a_host_in_cool_down_says_for_how_long_and_why() -> None:
    s = Scenario(start_np=2, min_np=1, host_failures=1, blacklist_cooldown=(90.0, 600.0))
    s.training(a=1, b=1)
    s.exit("b.0.1", -9)
    assert "1 min left: no new workers" not in show.hosts(document(s))
    row = next(line for line in show.hosts(document(s)).splitlines() if line.startswith("b"))
    assert "cool-down" in row
    assert "1 min left: b.0.1 was killed by signal 9" in row


def test_a_host_that_may_be_lost_says_since_when_and_by_which_evidence() -> None:
    s = Scenario(start_np=2).training(a=1, b=1)
    s.send(AgentSuspected("b", 1, "silent", "its heartbeat did not come in time"))
    s.now += 0.25
    row = next(line for line in show.hosts(document(s)).splitlines() if line.startswith("b"))
    assert row.endswith("may be lost, for 0.2 s: silent")
    s.send(AgentHeard("b", 1))
    assert "may be lost" not in show.hosts(document(s))


def test_columns_are_aligned_and_carry_no_trailing_spaces() -> None:
    assert show.table(("A", "LONG"), [("wide", "x"), ("", "")]) == "A     LONG\nwide  x\n"
    assert show.table(("A", "B"), []) == "A  B"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3600, "1 h 0 min"),
        (90000, "1 d 1 h"),
        (-5, "0 s"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert figures.duration(seconds) == words


def test_an_event_is_a_sentence_in_one_line_whatever_its_reason() -> None:
    line = b'{"n":7,"t":0.5,"event":"host_drained","host":"b","reason":"two\\nlines","more":1}'
    said = show.event(line).split(maxsplit=1)[1]
    assert said == "7 host b is empty: two lines [host_drained]"
    escape = b'{"n":1,"t":0.0,"event":"discovery_failed","reason":"\\u001b[2J gone"}'
    assert show.event(escape).endswith("hosts stay: ?[2J gone [discovery_failed]")
    opened = b'{"n":1,"t":0.0,"event":"round_opened","round":3}'
    assert show.event(opened).endswith("1 round 3 is opened [round_opened]")
    newer = b'{"n":1,"t":0.0,"event":"moon_seen","host":"b"}'
    assert show.event(newer).endswith("1 moon seen b [moon_seen]")


@pytest.mark.parametrize(
    ("state", "words"), [("starting", "it is starting"), ("checking", "its hosts are checked")]
)
def test_a_job_that_has_not_begun_is_starting(state: str, words: str) -> None:
    document = msgspec.json.encode(
        {"run_id": "big", "endpoint": "http://x", "started": 50.0, "state": state, "rounds": 1}
    )
    assert show.status(document, 57.0) == f"run big: {words}, for 7 s"
    with pytest.raises(ClusterError, match=f"run big is {state}; try again"):
        show.read_job(document)


@pytest.mark.parametrize(
    ("code", "word"), [(0, "succeeded"), (3, "failed"), (130, "stopped"), (143, "stopped")]
)
def test_a_job_that_was_told_to_stop_has_not_failed(code: int, word: str) -> None:
    result = JobResult(exit_code=code, reason="why", ended=10.0)
    assert show.ended(result, 12.0).startswith(f"{word} 2 s ago (status {code}): why")
