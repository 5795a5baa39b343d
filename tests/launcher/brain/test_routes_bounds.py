"""What jobs send to the Brain: the newest report of each waits, and new names come one by one."""

from __future__ import annotations

import pytest

from elastic_driver.brain.cluster import SILENT_S
from elastic_driver.brain.grants import JobOver, JobReport, Kind
from elastic_driver.brain.messages import JobDropped, JobEnded, JobHeard
from launcher.brain.routes import (
    NAMES,
    NAMES_S,
    OWN,
    REPORTS,
    REPORTS_S,
    RESERVE,
    Intake,
    listens_at,
)


class Loop:
    """The Brain's loop, with the time of a test."""

    def __init__(self, most: int = 1000) -> None:
        self.now, self.mail = 100.0, list[str | JobEnded | JobDropped]()
        self.intake = Intake(self.mail.append, most=most, clock=lambda: self.now)

    def heard(self, job: str, number: int = 0, peer: str | None = "a peer") -> str:
        report = JobReport(began=1.0, least=1 + number, kind=Kind(name=job, command=""))
        return self.intake.take(JobHeard(job, report), peer)

    def dropped(self) -> list[str]:
        """Return the jobs that have given way; the mailbox is empty then."""
        found = [message.job for message in self.mail if isinstance(message, JobDropped)]
        self.mail[:] = [message for message in self.mail if not isinstance(message, JobDropped)]
        self.work()
        return found

    def work(self) -> dict[str, int]:
        """Take in what has come; return the newest report of each job."""
        found = {}
        while self.mail:
            message = self.mail.pop(0)
            if isinstance(message, str):
                found[message] = self.intake.report_of(message).report.least - 1
        return found


def test_of_each_job_the_newest_report_waits() -> None:
    loop = Loop()
    assert [loop.heard("A", 1), loop.heard("B", 1), loop.heard("A", 2)] == ["", "", ""]
    assert loop.mail == ["A", "B"]
    assert loop.work() == {"A": 2, "B": 1}
    assert loop.heard("A", 3) == ""
    assert loop.work() == {"A": 3}


def test_so_many_reports_of_a_job_are_taken_each_second_and_the_newest_is_never_lost() -> None:
    loop = Loop()
    loop.intake.know("A")
    loop.intake.know("B")
    taken: list[int] = []
    for number in range(1000):
        assert loop.heard("A", number) == ""
        taken += loop.work().values()
    assert taken == list(range(int(REPORTS)))
    assert loop.heard("B") == ""
    assert loop.work() == {"B": 0}, "another job is not held up"
    loop.intake.release()
    assert loop.work() == {}, "its time has not come"
    loop.now += 2 / REPORTS_S
    loop.intake.release()
    assert loop.work() == {"A": 999}


def test_new_names_come_one_by_one_and_known_jobs_at_once() -> None:
    loop = Loop()
    loop.intake.know("honest")
    assert sum(loop.heard(f"fake-{n}") == "" for n in range(1500)) == NAMES + OWN
    assert loop.heard("late") == "too many new jobs come at once"
    assert loop.heard("honest") == ""
    loop.now += 1.0
    assert sum(loop.heard(f"more-{n}") == "" for n in range(100)) == NAMES_S
    assert len(loop.mail) == NAMES + OWN + NAMES_S + 1


def test_there_are_so_many_jobs_and_no_more_until_one_is_forgotten() -> None:
    loop = Loop(most=3)
    assert [loop.heard(name) for name in "ABC"] == ["", "", ""]
    assert loop.heard("D") == "the Brain has 3 jobs already"
    loop.intake.forget("A")
    assert loop.heard("D") == "the Brain has 3 jobs already", "a report of A waits"
    loop.work()
    loop.intake.forget("A")
    assert loop.heard("D") == ""


def test_a_client_that_brings_names_without_end_leaves_places_for_those_of_others() -> None:
    loop = Loop()
    fakes = [loop.heard(f"fake-{n}", peer="evil") == "" for n in range(1500)]
    assert sum(fakes) == NAMES + OWN
    assert loop.heard("honest", peer="good") == ""
    assert sum(loop.heard(f"more-{n}", peer="good") == "" for n in range(100)) == OWN - 1
    assert RESERVE > 2 * OWN
    peers = [f"peer {n}" for n in range(100)]
    assert sum(loop.heard(f"late of {p}", peer=p) == "" for p in peers) == RESERVE - 2 * OWN
    loop.now += 1.0
    assert sum(loop.heard(f"again-{n}", peer="evil") == "" for n in range(100)) == NAMES_S
    assert loop.heard("later", peer="good again") == ""


def test_when_the_brain_is_full_a_job_without_slots_of_who_has_the_most_gives_way() -> None:
    loop = Loop(most=6)
    assert [loop.heard(f"fake-{n}", peer="evil") for n in range(6)] == [""] * 6
    loop.work()
    loop.intake.note("fake-5", holds=True)
    assert loop.heard("honest", peer="good") == ""
    assert loop.dropped() == ["fake-4"], "the newest that has no slots"
    assert not loop.intake.knows("fake-4")
    assert loop.intake.knows("honest")
    assert loop.heard("another", peer="evil") == "the Brain has 6 jobs already"
    assert loop.heard("second", peer="good") == ""
    assert loop.dropped() == ["fake-3"]
    assert loop.heard("third", peer="good") == ""
    assert loop.dropped() == ["fake-2"]
    assert loop.heard("fourth", peer="good") == "the Brain has 6 jobs already", "three and three"
    loop.intake.note("fake-0", holds=True)
    loop.intake.note("fake-1", holds=True)
    assert loop.heard("fourth", peer="new") == "", "good has three without slots"
    assert loop.dropped() == ["third"]


def test_when_the_brain_is_full_names_that_nobody_uses_give_way_first() -> None:
    loop = Loop(most=3)
    assert [loop.heard(name, peer="one") for name in "ABC"] == ["", "", ""]
    loop.work()
    loop.now += SILENT_S / 2
    assert [loop.heard(name, peer="one") for name in "BC"] == ["", ""]
    assert loop.heard("D", peer="one") == "the Brain has 3 jobs already"
    loop.now += SILENT_S / 2 + 0.1
    assert loop.heard("D", peer="one") == ""
    assert loop.dropped() == ["A"]
    assert loop.heard("E", peer="one") == "the Brain has 3 jobs already"
    loop.intake.note("B", holds=True)
    loop.now += SILENT_S
    assert loop.heard("E", peer="one") == ""
    assert loop.dropped() == ["C"], "B has slots, and keeps them however long it is silent"


def test_a_new_name_without_a_peer_is_left_to_who_knows_the_peer() -> None:
    loop = Loop()
    assert loop.heard("A", peer=None)
    assert loop.heard("A") == ""
    assert loop.heard("A", peer=None) == ""


def test_the_end_of_a_job_that_nobody_knows_counts_as_a_new_name() -> None:
    loop = Loop()
    over = [JobEnded(f"fake-{n}", JobOver(began=1.0, exit_code=0)) for n in range(1500)]
    assert sum(loop.intake.take(each, "a peer") == "" for each in over) == NAMES + OWN
    assert not loop.intake.knows("fake-0")


@pytest.mark.parametrize(
    ("liveness", "peer", "may"),
    [
        ("10.0.0.1:4000", "10.0.0.1", True),
        ("10.0.0.1:4000", "::ffff:10.0.0.1", True),
        ("[fd00::1]:4000", "fd00::1", True),
        ("127.0.0.1:40000", "127.0.0.1", True),
        ("127.0.0.1:22", "127.0.0.1", False),
        ("169.254.169.254:80", "127.0.0.1", False),
        ("169.254.169.254:8080", "10.0.0.1", False),
        ("10.0.0.2:4000", "10.0.0.1", False),
        ("[::1]:99999999", "::1", False),
        ("10.0.0.1:", "10.0.0.1", False),
        ("10.0.0.1:-1", "10.0.0.1", False),
        ("10.0.0.1:٤٠٠٠", "10.0.0.1", False),
        ("localhost:4000", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("127.0.0.1:4000", "", False),
    ],
)
def test_a_driver_is_looked_for_where_its_reports_come_from_and_nowhere_else(
    liveness: str, peer: str, may: bool
) -> None:
    assert listens_at(liveness, peer) is may
