"""A job's word counts for its own: no report takes a slot from another job, whatever it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_driver.brain.algorithm import HostView, Plan, faults
from elastic_driver.brain.cluster import SILENT_S, Cluster
from elastic_driver.brain.fair import fair
from elastic_driver.brain.grants import (
    JOB_LEASE_S,
    MOST_LIVES_ON_S,
    Grant,
    JobOver,
    JobReport,
    Kind,
    Proved,
    Receipts,
    Speed,
)
from elastic_driver.brain.jobs import CHANGE_S, CHANGES, TURN_S
from elastic_driver.brain.messages import (
    AskAlgorithm,
    HostsFound,
    JobEnded,
    JobHeard,
    Planned,
    PublishGrant,
    Tell,
)
from elastic_driver.brain.plans import PATIENCE
from elastic_driver.job.events import Tick

HOSTS = {"n1": 2, "n2": 2}
FAIR = 2  # slots of each of two jobs


class Brain:
    """The machine with the built-in algorithm; `most` is what each run was ever granted."""

    def __init__(self) -> None:
        self.now, self.cluster = 1000.0, Cluster()
        self.grants: dict[str, Grant] = {}
        self.most: dict[tuple[str, float], dict[str, int]] = {}
        self.told: list[Tell] = []
        self.asked: list[AskAlgorithm] = []
        self.answers = True
        self.send(HostsFound(tuple(HostView(name=n, slots=s) for n, s in HOSTS.items())))

    def send(self, event: Any, after: float = 0.0) -> None:
        self.now += after
        decisions = self.cluster.handle(event, self.now)
        assert self.cluster.check() == []
        for decision in decisions:
            if isinstance(decision, PublishGrant):
                self.grants[decision.job] = decision.grant
                most = self.most.setdefault((decision.job, decision.grant.began), {})
                for host, slots in decision.grant.hosts.items():
                    most[host] = max(slots, most.get(host, 0))
            elif isinstance(decision, Tell):
                self.told.append(decision)
            elif isinstance(decision, AskAlgorithm):
                self.asked.append(decision)
        for job in self.cluster.runs():
            most = self.most.get((job.name, job.report.began), {})
            for host, slots in job.claims().items():
                assert slots <= most.get(host, 0), f"{job.name} counts for more than it was granted"
        while self.answers and self.asked:
            ask = self.asked.pop(0)
            plan = fair(ask.view)
            assert faults(ask.view, plan) == []
            self.send(Planned(ask.request, plan))

    def say(self, job: str, proved: Proved | None = None, **fields: Any) -> None:
        fields = {"began": 1.0, "least": 1, **fields}
        self.send(JobHeard(job, JobReport(kind=Kind(name=job, command=""), **fields), proved))

    def obey(self, job: str, **fields: Any) -> dict[str, int]:
        """An honest job: it uses what it was granted."""
        grant = self.grants.get(job)
        has: dict[str, Any] = (
            {} if grant is None else {"carried_out": grant.number, "holding": grant.hosts}
        )
        self.say(job, **has, **fields)
        return dict(self.grants[job].hosts) if job in self.grants else {}

    def size(self, job: str) -> int:
        return sum(self.grants[job].hosts.values()) if job in self.grants else 0


@pytest.fixture
def shared() -> Brain:
    """Two honest jobs have half of the slots each."""
    brain = Brain()
    for _ in range(4):
        brain.obey("honest")
        brain.obey("other")
        brain.now += 1.0
    assert (brain.size("honest"), brain.size("other")) == (FAIR, FAIR)
    return brain


# ---- what a job says it holds --------------------------------------------------------------


def test_a_job_that_says_it_holds_every_slot_holds_none_that_was_not_granted(
    shared: Brain,
) -> None:
    shared.say("evil", holding={"n1": 2, "n2": 2}, lives_on=MOST_LIVES_ON_S, liveness="a:1")
    assert shared.cluster.jobs["evil"].claims().keys() <= shared.grants["evil"].hosts.keys()
    told = [each for each in shared.told if each.what.name == "job_disbelieved"]
    assert [each.reason for each in told] == [
        "it says that it holds 4 slots more than this Brain has granted it; they do not count"
    ]
    for _ in range(30):  # evil is silent, and the honest jobs have all slots again
        shared.obey("honest")
        shared.obey("other")
        shared.send(Tick(), after=1.0)
    assert shared.size("honest") + shared.size("other") >= 2 * FAIR - 1
    assert len([each for each in shared.told if each.what.name == "job_disbelieved"]) == 1


def test_a_job_that_gave_slots_up_does_not_get_them_back_by_its_word(shared: Brain) -> None:
    had = dict(shared.grants["other"].hosts)
    shared.obey("new")
    for _ in range(3):
        for name in ("honest", "other", "new"):
            shared.obey(name)
        shared.now += 1.0
    kept = shared.grants["other"]
    shared.say("other", carried_out=kept.number, holding=dict.fromkeys(had, 2))
    assert shared.cluster.jobs["other"].claims() == {h: n for h, n in kept.hosts.items() if n}


def test_a_number_that_no_brain_has_given_is_nothing(shared: Brain) -> None:
    before = shared.cluster.number
    shared.say("evil", carried_out=2**53, holding={"n1": 2})
    assert shared.cluster.number < before + 100
    assert max(grant.number for grant in shared.grants.values()) < before + 100
    assert shared.cluster.jobs["evil"].report.carried_out == 0


def test_a_job_that_begins_again_and_again_gets_no_more_slots_by_that(shared: Brain) -> None:
    for began in range(2, 40):
        shared.say("other", began=float(began), lives_on=MOST_LIVES_ON_S, liveness="a:1")
        newest = shared.grants["other"]
        assert newest.hosts == {}
        assert newest.reason == "an earlier run of it may have processes"
        shared.obey("honest")
        shared.now += 0.1
    assert shared.size("honest") == FAIR
    claims = [sum(job.claims().values()) for job in shared.cluster.runs() if job.name == "other"]
    assert sum(claims) == FAIR
    shared.send(JobEnded("other", JobOver(began=1.0, exit_code=137)))
    assert shared.size("other") == FAIR


def test_what_is_said_of_hosts_that_the_brain_does_not_have_is_not_kept(shared: Brain) -> None:
    nowhere = {f"h{n}": 0 for n in range(10_000)}
    shared.say("evil", room=nowhere, starved=nowhere, planned=nowhere, holding=nowhere)
    report = shared.cluster.jobs["evil"].report
    assert (report.room, report.starved, report.planned, report.holding) == ({}, {}, {}, {})


# ---- receipts ------------------------------------------------------------------------------


def grant_of(number: int) -> Grant:
    return Grant(began=1.0, number=number, hosts={"n1": 1}, reason="")


def test_a_receipt_proves_one_grant_of_one_run_of_one_job() -> None:
    mine = Receipts("the token", "a book")
    receipt = mine.of("A", grant_of(7), {"n1": 1, "n2": 2})
    proved = mine.read(receipt, "A", 1.0)
    assert proved == Proved(number=7, hosts={"n1": 1}, claims={"n1": 1, "n2": 2}, known=True)
    later = Receipts("the token", "another book").read(receipt, "A", 1.0)
    assert later == Proved(number=7, hosts={"n1": 1}, claims={"n1": 1, "n2": 2}, known=False)
    assert mine.read(receipt, "B", 1.0) is None
    assert mine.read(receipt, "A", 2.0) is None
    assert Receipts("another token", "a book").read(receipt, "A", 1.0) is None


@given(st.text(max_size=200))
def test_no_other_text_is_a_receipt(text: str) -> None:
    mine = Receipts("the token", "a book")
    real = mine.of("A", grant_of(7), {})
    for wrong in (text, f"{text}.{text}", f"{real}{text}x", f"{text}x{real}"):
        assert mine.read(wrong, "A", 1.0) is None


def test_a_receipt_of_this_state_brings_nothing_back(shared: Brain) -> None:
    number, hosts = shared.grants["other"].number, dict(shared.grants["other"].hosts)
    shared.send(JobEnded("other", JobOver(began=1.0, exit_code=0)))
    for _ in range(3):
        shared.obey("honest")
        shared.now += 1.0
    assert shared.size("honest") == 2 * FAIR
    proved = Proved(number=number, hosts=hosts, claims=hosts, known=True)
    shared.say("other", proved, began=2.0, carried_out=number, holding=hosts)
    assert shared.cluster.jobs["other"].claims() == {}


# ---- what a job wants ----------------------------------------------------------------------


def test_a_job_that_changes_its_mind_all_the_time_is_heard_now_and_then(shared: Brain) -> None:
    sizes = []
    for number in range(60):
        shared.say("evil", weight=[1e-6, 1e6][number % 2], carried_out=0)
        shared.obey("other")
        sizes.append(sum(shared.obey("honest").values()))
        shared.now += 1.0
    changes = sum(one != other for one, other in pairwise(sizes))
    assert changes <= 2 * (CHANGES + 60 / CHANGE_S)
    assert min(sizes) >= 1


def test_plans_come_through_while_a_job_changes_its_limits_faster_than_they_are_made() -> None:
    brain = Brain()
    brain.answers = False
    brain.say("evil")
    for number in range(PATIENCE + 1):
        brain.say(f"late{number}")  # after each question another job comes
        ask = brain.asked.pop(0)
        assert not brain.grants, f"plan {number} is too late"
        brain.send(Planned(ask.request, fair(ask.view)))
    assert brain.size("evil") >= 1
    assert brain.asked, "those who came later are planned for next"


def test_a_plan_that_comes_too_late_again_and_again_counts_for_nobody_who_has_changed() -> None:
    brain = Brain()
    brain.answers = False
    brain.say("honest")
    brain.say("evil")
    for number in range(PATIENCE + 1):
        brain.say("evil", most=2 + number)
        ask = brain.asked.pop(0)
        everything = {"honest": {"n1": 1}, "evil": {"n2": 2}}
        known = {job.name for job in ask.view.jobs}
        plan = {job: at for job, at in everything.items() if job in known}
        brain.send(Planned(ask.request, Plan(workers=plan, reason="a test says so")))
    assert brain.grants["honest"].hosts == {"n1": 1}
    assert "evil" not in brain.grants


# ---- silence -------------------------------------------------------------------------------


def test_a_job_without_slots_keeps_its_turn_for_a_while_and_is_forgotten(shared: Brain) -> None:
    shared.say("evil", least=50, lives_on=MOST_LIVES_ON_S)
    shared.obey("honest")
    shared.send(Tick(), after=SILENT_S)
    assert not shared.cluster.jobs["evil"].is_live
    shared.send(Tick(), after=TURN_S)
    assert "evil" not in shared.cluster.jobs


def test_slots_that_a_job_without_a_driver_never_used_are_free_in_the_end() -> None:
    brain = Brain()
    brain.say("evil", least=4, lives_on=20.0)
    assert brain.size("evil") == 4
    for _ in range(int(JOB_LEASE_S + 20.0) + 5):
        brain.obey("honest")
        brain.send(Tick(), after=1.0)
    assert brain.size("honest") == 4


# ---- whatever is said ----------------------------------------------------------------------

_COUNTS = st.sampled_from([0, 1, 2, 3, 2**31, 2**53])
_SLOTS = st.dictionaries(
    st.sampled_from(["n1", "n2", "elsewhere"]), st.sampled_from([0, 1, 2, 100_000]), max_size=3
)
_SPEEDS = st.builds(
    Speed,
    round=_COUNTS,
    size=st.sampled_from([1, 2, 4, 100_000]),
    hosts=st.sampled_from([1, 2, 10_000]),
    worker=st.just("w"),
    steps=st.sampled_from([-1, 0, 1, 100, 2**53]),
    at=st.sampled_from([0.0, 1e-9, 1000.0, 1e12]),
    micro_batches=st.none() | _COUNTS,
    noise=st.none() | st.sampled_from([0.0, 1e-9, 1e12]),
)
_REPORTS = st.fixed_dictionaries(
    {
        "began": st.sampled_from([1.0, 2.0, 3.0]),
        "least": st.sampled_from([1, 2, 3, 100_000]),
        "weight": st.sampled_from([1e-6, 1.0, 1e6]),
        "held": st.none() | st.sampled_from([1, 3, 100_000]),
        "carried_out": _COUNTS,
        "holding": _SLOTS,
        "lives_on": st.sampled_from([0.0, 5.0, MOST_LIVES_ON_S]),
        "liveness": st.sampled_from(["", "a:1"]),
        "memory_need": _COUNTS,
        "room": _SLOTS,
        "starved": _SLOTS,
        "planned": _SLOTS,
        "speed": st.none() | _SPEEDS,
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from("EFG"), _REPORTS), max_size=25))
def test_an_honest_job_keeps_its_fewest_workers_whatever_the_others_say(
    said: list[tuple[str, dict[str, Any]]],
) -> None:
    """Nobody counts for more than it was granted either: `Brain.send` looks after each event."""
    brain = Brain()
    for _ in range(3):
        brain.obey("honest", least=2)
    for name, fields in said:
        brain.now += 0.5
        brain.say(name, **fields)
        assert sum(brain.obey("honest", least=2).values()) >= 2


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_REPORTS, max_size=25))
def test_an_honest_job_keeps_half_of_the_slots_beside_one_that_wants_as_much(
    said: list[dict[str, Any]],
) -> None:
    """Whatever it says of anything but its weight, its size, its speed and single hosts."""
    brain = Brain()
    for _ in range(3):
        brain.obey("honest")
    for fields in said:
        brain.now += 0.5
        sized = {"least": 1, "weight": 1.0, "held": None, "speed": None}
        alike = {"memory_need": 0, "room": {}, "starved": {}, "planned": {}}
        brain.say("E", **{**fields, **sized, **alike})
        assert sum(brain.obey("honest").values()) >= FAIR
