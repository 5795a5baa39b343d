"""The Brain's machine, one rule after the other."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.brain.algorithm import HostView, Plan, View
from elastic_driver.brain.cluster import ENDED_KEPT, SILENT_S, BrainDecision, Cluster
from elastic_driver.brain.fair import fair
from elastic_driver.brain.grants import JOB_LEASE_S, JobOver, JobReport, Kind, Proved
from elastic_driver.brain.jobs import PROBE_S, STUCK_S
from elastic_driver.brain.messages import (
    AskAlgorithm,
    DriverProbed,
    HostsFound,
    HostsMeasured,
    JobDropped,
    JobEnded,
    JobForgotten,
    JobHeard,
    JobSilent,
    PlanFailed,
    Planned,
    ProbeDriver,
    PublishGrant,
    Tell,
    WithdrawGrant,
)
from elastic_driver.brain.plans import ANSWER_S, GATHER_S, RETRY_S
from elastic_driver.job.events import Tick
from tests.brain.world import World

LIVES_ON_S = 10.0
GIB = 2**30
FALLING = [0, 1, 1.8, 2.4, 2.2, 2.0, 1.7, 1.4, 1.2]


class Brain:
    """A machine, with the plans that a test names; its decisions by kind."""

    def __init__(self, hosts: dict[str, int], algorithm: str = "") -> None:
        self.now = 0.0
        self.cluster = Cluster(algorithm)
        self.plans: list[dict[str, dict[str, int]]] = []
        self.asked: list[AskAlgorithm] = []
        self.grants: dict[str, dict[str, int]] = {}
        self.numbers: dict[str, int] = {}
        self.told: list[Tell] = []
        self.probes: list[ProbeDriver] = []
        self.withdrawn: list[str] = []
        self.ended: set[str] = set()  # jobs at whose driver's address nobody listens
        self.unproved: set[str] = set()  # or somebody who is not that driver
        self.hosts(hosts)

    def hosts(self, hosts: dict[str, int]) -> None:
        self.send(HostsFound(tuple(HostView(name=n, slots=s) for n, s in hosts.items())))

    def send(self, event: Any, after: float = 0.0) -> list[BrainDecision]:
        self.now += after
        decisions = self.cluster.handle(event, self.now)
        assert self.cluster.check() == []
        for decision in decisions:
            if isinstance(decision, PublishGrant):
                self.grants[decision.job] = dict(decision.grant.hosts)
                self.numbers[decision.job] = decision.grant.number
            elif isinstance(decision, AskAlgorithm):
                self.asked.append(decision)
                if self.plans:
                    plan = Plan(workers=self.plans.pop(0), reason="the test says so")
                    decisions = [*decisions, *self.send(Planned(decision.request, plan))]
            elif isinstance(decision, ProbeDriver):
                self.probes.append(decision)
                result: Any = "refused" if decision.job in self.ended else "answered"
                if decision.job in self.unproved:
                    result = "unproved"
                self.send(DriverProbed(decision.job, decision.began, decision.liveness, result))
            elif isinstance(decision, WithdrawGrant):
                self.withdrawn.append(decision.job)
            else:
                self.told.append(decision)
        return decisions

    def report(
        self, job: str, proved: Proved | None = None, after: float = 0.0, **fields: Any
    ) -> None:
        fields = {"began": 1.0, "least": 1, "lives_on": LIVES_ON_S, "liveness": job, **fields}
        said = JobReport(kind=Kind(name=job, command=""), **fields)
        self.send(JobHeard(job, said, proved), after)

    def lose(self, job: str) -> None:
        """The connection to its driver has ended."""
        report = self.cluster.jobs[job].report
        self.send(DriverProbed(job, report.began, report.liveness, "lost"))

    def carried_out(self, job: str, holding: dict[str, int] | None = None) -> None:
        held = self.grants[job] if holding is None else holding
        self.report(job, carried_out=self.numbers[job], holding=held)


@pytest.fixture
def two() -> Brain:
    """A and B have two slots each, on n1 and n2."""
    brain = Brain({"n1": 2, "n2": 2})
    brain.plans = [{"A": {"n1": 2, "n2": 2}}]
    brain.report("A")
    brain.carried_out("A")
    brain.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}]
    brain.report("B")
    brain.carried_out("A")
    brain.carried_out("B")
    return brain


def test_a_job_that_arrives_gets_what_the_plan_says() -> None:
    brain = Brain({"n1": 4})
    brain.plans = [{"A": {"n1": 3}}]
    brain.report("A")
    assert brain.grants == {"A": {"n1": 3}}
    assert brain.asked[0].view.event == "job arrived"


def test_a_slot_is_given_on_only_when_the_job_before_has_no_process_there() -> None:
    brain = Brain({"n1": 4})
    brain.plans = [{"A": {"n1": 4}}]
    brain.report("A")
    brain.carried_out("A")
    brain.plans = [{"A": {"n1": 2}, "B": {"n1": 2}}]
    brain.report("B")
    assert brain.grants == {"A": {"n1": 2}, "B": {}}
    brain.report("A", carried_out=brain.numbers["A"] - 1, holding={"n1": 2})
    assert brain.grants["B"] == {}, "the report is older than the grant"
    brain.carried_out("A", holding={"n1": 4})
    assert brain.grants["B"] == {}
    brain.carried_out("A")
    assert brain.grants["B"] == {"n1": 2}


def test_slots_that_become_free_one_after_the_other_are_given_together() -> None:
    brain = Brain({"n1": 4})
    brain.plans = [{"A": {"n1": 4}}]
    brain.report("A")
    brain.carried_out("A")
    brain.plans = [{"A": {"n1": 1}, "B": {"n1": 3}}]
    brain.report("B")
    brain.carried_out("A", holding={"n1": 2})
    assert brain.grants["B"] == {}
    assert brain.cluster.deadline() == brain.now + GATHER_S
    brain.send(Tick(), after=GATHER_S)
    assert brain.grants["B"] == {"n1": 2}
    brain.carried_out("A")
    assert brain.grants["B"] == {"n1": 3}


def test_the_slots_of_a_driver_that_has_ended_are_free_when_its_processes_have_ended(
    two: Brain,
) -> None:
    two.ended = {"B"}
    two.send(JobSilent("B"))
    assert [told.what.name for told in two.told][-2:] == ["job_silent", "job_lost"]
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.send(Tick(), after=LIVES_ON_S - 1)
    assert two.grants["A"] == {"n1": 2}
    two.carried_out("A")
    two.send(Tick(), after=1.0)
    assert two.grants["A"] == {"n1": 2, "n2": 2}
    assert "job_gone" in [told.what.name for told in two.told]
    assert two.withdrawn == ["B"]


def test_a_driver_that_is_stopped_or_cut_off_keeps_its_slots_however_long_it_is_silent(
    two: Brain,
) -> None:
    two.send(JobSilent("B"))
    two.plans = [{"A": {"n1": 2}}]
    for _ in range(5):
        two.carried_out("A")
        two.send(Tick(), after=SILENT_S / 2)
    assert two.grants == {"A": {"n1": 2}, "B": {"n2": 2}}
    looks = [probe for probe in two.probes if probe.reason == "its driver is silent"]
    assert len(looks) == 1, "the connection stands"
    two.ended = {"B"}
    two.lose("B")
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.now += LIVES_ON_S
    two.carried_out("A")
    assert two.grants["A"] == {"n1": 2, "n2": 2}


def test_who_takes_the_port_of_a_driver_that_has_ended_keeps_its_slots_no_longer(
    two: Brain,
) -> None:
    two.unproved = {"B"}
    two.lose("B")  # while it is heard: it is looked for again
    assert [told.what.name for told in two.told if told.job == "B"] == ["job_arrived"]
    two.send(JobSilent("B"))
    assert [told.what.name for told in two.told][-2:] == ["job_silent", "job_lost"]
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.send(Tick(), after=LIVES_ON_S - 1)
    two.carried_out("A")
    assert two.grants["A"] == {"n1": 2}
    two.send(Tick(), after=1.0)
    assert two.grants["A"] == {"n1": 2, "n2": 2}


def test_a_driver_that_proves_itself_late_keeps_its_slots(two: Brain) -> None:
    two.unproved = {"B"}
    two.lose("B")
    two.send(JobSilent("B"))
    two.unproved = set()
    two.plans = [{"A": {"n1": 2}}]
    for _ in range(3):
        two.carried_out("A")
        two.send(Tick(), after=PROBE_S)
    assert two.told[-1].reason == "its driver lives; its slots stay its own"
    two.carried_out("A")
    two.send(Tick(), after=LIVES_ON_S)
    assert two.grants == {"A": {"n1": 2}, "B": {"n2": 2}}


def test_a_port_that_nobody_has_any_more_is_certain_after_a_doubt(two: Brain) -> None:
    two.unproved = {"B"}
    two.lose("B")
    two.send(JobSilent("B"))
    gone_at = two.cluster.jobs["B"].gone_at
    two.unproved, two.ended = set(), {"B"}
    two.send(Tick(), after=PROBE_S)
    known = two.cluster.jobs["B"]
    assert (known.gone_at, known.is_doubted, known.probe_at) == (gone_at, False, None)


def test_a_brain_that_starts_again_looks_anew_and_believes_no_stranger(two: Brain) -> None:
    two.cluster = Cluster.restored(two.cluster.snapshot())
    assert not any(job.is_watched for job in two.cluster.runs())
    two.unproved = {"B"}
    two.carried_out("A")
    assert two.cluster.jobs["A"].is_watched
    two.plans = [{"A": {"n1": 2}}] * 3
    two.send(Tick(), after=JOB_LEASE_S)
    assert "job_lost" in [told.what.name for told in two.told]
    two.carried_out("A")
    two.plans = [{"A": {"n1": 2, "n2": 2}}] * 3
    two.send(Tick(), after=LIVES_ON_S)
    assert list(two.cluster.jobs) == ["A"]


def test_the_end_of_a_driver_counts_not_for_the_next_one_at_another_port(two: Brain) -> None:
    before = two.cluster.jobs["B"].report
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}] * 3
    two.report("B", liveness="another", carried_out=two.numbers["B"], holding={"n2": 2})
    assert two.cluster.jobs["B"].found_at == "another"
    two.send(DriverProbed("B", before.began, before.liveness, "lost"))
    two.send(DriverProbed("B", before.began, before.liveness, "refused"))
    assert two.cluster.jobs["B"].is_watched
    two.send(JobSilent("B"))
    assert two.cluster.jobs["B"].gone_at is None


@pytest.mark.parametrize("result", ["refused", "unproved"])
def test_a_driver_that_was_never_found_at_its_address_is_not_taken_for_dead(result: str) -> None:
    brain = Brain({"n1": 2})  # for example, because a firewall refuses connections
    (brain.ended if result == "refused" else brain.unproved).add("A")
    brain.plans = [{"A": {"n1": 2}}]
    brain.report("A")
    brain.carried_out("A")
    brain.send(JobSilent("A"))
    brain.send(Tick(), after=100 * LIVES_ON_S)
    assert list(brain.cluster.jobs) == ["A"]


def test_a_silent_job_is_forgotten_when_an_administrator_says_so(two: Brain) -> None:
    two.send(JobForgotten("B"))
    assert list(two.cluster.jobs) == ["A", "B"], "it is heard"
    two.send(JobSilent("B"))
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.send(JobForgotten("B"))
    assert two.grants["A"] == {"n1": 2, "n2": 2}
    two.report("B", carried_out=two.numbers["B"], holding={"n2": 2})
    assert two.asked[-1].view.jobs[-1].at == {}, "its slots are A's now"
    assert "job_disbelieved" in [told.what.name for told in two.told]


def test_a_driver_that_comes_late_is_told_anew_which_slots_it_has(two: Brain) -> None:
    before = two.numbers["B"]
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}]
    two.report("B", carried_out=0)
    assert two.grants["B"] == {"n2": 2}
    assert two.numbers["B"] > before
    again = two.numbers["B"]
    two.report("B", carried_out=0)
    assert two.numbers["B"] == again, "once"


def test_a_job_without_a_lease_is_silent_as_soon_as_one_whose_lease_ends(two: Brain) -> None:
    two.carried_out("A")
    deadline = two.now + SILENT_S
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}]
    two.report("A", after=1.0, carried_out=two.numbers["A"], holding={"n1": 2})
    assert two.cluster.deadline() == deadline == two.now + JOB_LEASE_S - 1.0
    two.send(Tick(), after=SILENT_S - 1.0)
    assert [told.job for told in two.told if told.what.name == "job_silent"] == ["B"]


def test_a_report_that_comes_after_the_end_of_its_run_brings_no_job_back(two: Brain) -> None:
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.send(JobEnded("B", JobOver(began=1.0, exit_code=0)))
    two.carried_out("B", holding={"n2": 2})
    assert list(two.cluster.jobs) == ["A"]
    two.report("B", began=2.0)
    assert list(two.cluster.jobs) == ["A", "B"]


def test_a_run_that_was_replaced_while_it_owed_slots_keeps_the_brain_from_no_rest(
    two: Brain,
) -> None:
    two.plans = [{"A": {"n1": 2, "n2": 1}, "B": {"n2": 1}}]
    two.report("B", weight=0.5, carried_out=two.numbers["B"], holding={"n2": 2})
    assert two.cluster.jobs["B"].owes_since is not None
    two.plans = [{"A": {"n1": 2}}] * 9
    two.report("B", began=2.0)
    for _ in range(int(STUCK_S / 5) + 2):
        two.carried_out("A")
        two.report("B", began=2.0)
        two.send(Tick(), after=5.0)
    assert [job.report.began for job in two.cluster.former] == [1.0], "it may have processes"
    due = two.cluster.deadline()
    assert due is None or due > two.now


def test_ends_of_runs_that_nobody_knows_make_no_other_end_forgotten(two: Brain) -> None:
    two.plans = [{"A": {"n1": 2, "n2": 2}}] * 2
    two.send(JobEnded("B", JobOver(began=1.0, exit_code=0)))
    for number in range(ENDED_KEPT + 1):
        two.send(JobEnded(f"fake-{number}", JobOver(began=1.0, exit_code=0)))
    two.report("B", holding={"n2": 2})  # late
    assert list(two.cluster.jobs) == ["A"]


def test_a_job_gives_its_place_up_if_it_has_no_slots(two: Brain) -> None:
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}] * 3
    two.report("C")
    for name in ("B", "C", "unknown"):
        two.send(JobDropped(name))
    assert list(two.cluster.jobs) == ["A", "B"]
    assert two.withdrawn == ["C"]
    assert two.told[-1].reason == "it has no slots, and others need its place"
    two.report("C")
    assert list(two.cluster.jobs) == ["A", "B", "C"], "it may ask again"


def test_a_silent_job_that_comes_back_keeps_its_slots(two: Brain) -> None:
    two.send(JobSilent("B"))
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}]
    two.report("B", after=5.0, carried_out=two.numbers["B"], holding={"n2": 2})
    two.send(Tick(), after=LIVES_ON_S)
    assert two.grants == {"A": {"n1": 2}, "B": {"n2": 2}}


def test_a_new_run_gets_the_slots_of_the_run_before_when_that_has_certainly_ended(
    two: Brain,
) -> None:
    two.report("B", began=2.0)
    assert two.asked[-1].view.hosts == (HostView(name="n1", slots=2),)
    two.plans = [{"A": {"n1": 2}}]
    two.send(Planned(two.asked[-1].request, Plan(workers={"A": {"n1": 2}}, reason="no room")))
    assert two.grants["B"] == {}
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}]
    two.send(JobEnded("B", JobOver(began=1.0, exit_code=143)))
    assert two.grants["B"] == {"n2": 2}


def test_the_slots_of_a_job_that_ends_are_free_at_once(two: Brain) -> None:
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.send(JobEnded("B", JobOver(began=1.0, exit_code=0)))
    assert two.grants["A"] == {"n1": 2, "n2": 2}
    assert two.asked[-1].view.event == "slots freed"


def test_a_job_that_does_not_move_gathers_no_slots_and_no_plan_counts_on_it(two: Brain) -> None:
    two.plans = [{"A": {"n1": 1, "n2": 2}, "B": {"n1": 1}}]
    held = {"carried_out": two.numbers["B"], "holding": {"n2": 2}}
    two.report("B", planned={"n2": 0}, **held)
    two.carried_out("A")
    two.send(Tick(), after=GATHER_S)
    assert two.grants == {"A": {"n1": 1}, "B": {"n1": 1}}, "B moves, and has not gone yet"
    two.plans = [{"A": {"n2": 2}, "B": {"n1": 2}}]
    two.report("B", planned={"n2": 0}, starved={"n2": 1}, **held)
    assert two.grants == {"A": {"n1": 1}, "B": {"n1": 1}}, "it gets no more before it goes"
    two.plans = [{"A": {"n1": 1}}]
    for _ in range(int(STUCK_S)):
        two.now += 1.0
        two.carried_out("A")
        two.report("B", planned={"n2": 0}, starved={"n2": 1}, **held)
    assert [told.job for told in two.told if told.what.name == "job_stuck"] == ["B"]
    assert two.asked[-1].view.event == "slots lost"
    assert two.asked[-1].view.hosts == (HostView(name="n1", slots=1),)
    assert [job.name for job in two.asked[-1].view.jobs] == ["A"]
    two.plans = [{"A": {"n1": 1, "n2": 2}, "B": {"n1": 1}}]
    two.carried_out("B")
    assert two.asked[-1].view.event == "limits changed, job back"
    assert two.grants == {"A": {"n1": 1, "n2": 2}, "B": {"n1": 1}}


def test_a_host_that_is_lost_is_not_given_and_what_still_runs_there_counts(two: Brain) -> None:
    two.plans = [{"A": {"n1": 1}, "B": {"n1": 1}}]
    two.hosts({"n1": 2})
    assert two.grants == {"A": {"n1": 1}, "B": {"n2": 2}}, "n1 is not free yet"
    two.carried_out("A")
    assert two.grants["B"] == {"n1": 1}
    two.carried_out("B", holding={"n1": 1, "n2": 2})
    two.plans = [{"A": {"n1": 1, "n2": 2}, "B": {"n1": 1}}]
    two.hosts({"n1": 2, "n2": 2})
    assert two.grants["A"] == {"n1": 1}, "B has processes on n2"
    two.carried_out("B")
    assert two.grants["A"] == {"n1": 1, "n2": 2}


# ---- memory and processors -----------------------------------------------------------------


def lacking(brain: Brain, job: str, **fields: Any) -> list[AskAlgorithm]:
    """The job reports what its workers lack; the built-in algorithm answers. What was asked?"""
    before = len(brain.asked)
    fields = {"carried_out": brain.numbers[job], "holding": brain.grants[job], **fields}
    brain.report(job, **fields)
    asked = brain.asked[before:]
    for ask in asked:
        brain.send(Planned(ask.request, fair(ask.view)))
    return asked


def test_a_worker_out_of_memory_is_a_reason_for_a_plan_once(two: Brain) -> None:
    short: dict[str, Any] = {"memory_need": 3 * GIB, "room": {"n1": 1}}
    (ask,) = lacking(two, "A", **short)
    assert ask.view.event == "out of memory"
    assert [(job.memory, job.room) for job in ask.view.jobs] == [(3 * GIB, {"n1": 1}), (None, {})]
    assert two.cluster.jobs["A"].target == {"n1": 1, "n2": 1}, "B gets the slot on n1"
    assert lacking(two, "A", **short) == []
    more = short | {"room": {"n1": 1, "n9": 7}}
    assert lacking(two, "A", **more) == [], "another host has been measured, and is large enough"
    (ask,) = lacking(two, "A", **(more | {"memory_need": 4 * GIB}))
    assert ask.view.event == "out of memory"


def test_a_granted_host_that_proves_too_small_is_a_reason_for_a_plan(two: Brain) -> None:
    short: dict[str, Any] = {"memory_need": 3 * GIB, "room": {"n9": 0}}
    lacking(two, "A", **short)
    (ask,) = lacking(two, "A", **(short | {"room": {"n9": 0, "n1": 1}}))
    assert ask.view.event == "out of memory"


def test_a_starved_host_is_a_reason_for_a_plan_once(two: Brain) -> None:
    (ask,) = lacking(two, "A", starved={"n1": 1})
    assert ask.view.event == "CPU starved"
    assert [job.starved for job in ask.view.jobs] == [{"n1": 1}, {}]
    assert two.cluster.jobs["A"].target == {"n1": 1, "n2": 1}, "B gets the slot on n1"
    assert lacking(two, "A", starved={"n1": 1}) == []
    (ask,) = lacking(two, "A")
    assert ask.view.event == "limits changed", "a user has let it go"


def test_slots_that_a_user_s_plan_leaves_unused_go_to_another_job(two: Brain) -> None:
    (ask,) = lacking(two, "A", planned={"n1": 1}, most=1)
    assert ask.view.event == "limits changed"
    assert two.grants == {"A": {"n1": 1}, "B": {"n2": 2}}, "A has not let go yet"
    two.carried_out("A")
    assert two.grants["B"] == {"n1": 1, "n2": 2}


def test_a_job_moves_to_the_host_that_has_the_memory_for_it(two: Brain) -> None:
    """Another job gives up a slot there, and gets the one that is too small."""
    figures = {"n1": 1 * GIB, "n2": 8 * GIB}
    measured = (HostView(name=n, slots=2, memory_free=free) for n, free in figures.items())
    two.send(HostsMeasured(tuple(measured)))
    lacking(two, "A", least=2, memory_need=3 * GIB, room={"n1": 1})
    assert two.grants == {"A": {"n1": 2}, "B": {"n2": 1}}, "B has not let go yet"
    two.carried_out("B")
    assert two.grants["A"] == {"n1": 1, "n2": 1}
    assert two.cluster.jobs["B"].target == {"n1": 1, "n2": 1}


def test_a_job_is_told_that_no_host_is_large_enough(two: Brain) -> None:
    two.plans = [{"A": {"n1": 2}}]
    two.send(JobEnded("B", JobOver(began=1.0, exit_code=0)))
    measured = (HostView(name=n, slots=2, memory_free=free * GIB) for n, free in (("n2", 2),))
    two.send(HostsMeasured(tuple(measured)))
    lacking(two, "A", memory_need=3 * GIB, room={"n1": 0})
    assert two.grants["A"] == {}
    assert two.cluster.jobs["A"].grants[-1].too_small == ("n2", 2 * GIB)


def test_a_job_waits_for_a_host_that_is_large_enough_when_others_leave_it(two: Brain) -> None:
    measured = (HostView(name=n, slots=2, memory_free=free * GIB) for n, free in (("n2", 2),))
    two.send(HostsMeasured(tuple(measured)))
    lacking(two, "A", memory_need=3 * GIB, room={"n1": 0})
    assert two.grants["A"] == {}
    assert two.cluster.jobs["A"].grants[-1].too_small is None, "B uses n2"


def test_a_plan_with_too_many_workers_for_the_memory_is_refused(two: Brain) -> None:
    two.cluster.use("mine")
    two.plans = [{"A": {"n1": 2}, "B": {"n2": 2}}]
    before = len(two.asked)
    two.report(
        "A",
        carried_out=two.numbers["A"],
        holding={"n1": 2},
        memory_need=3 * GIB,
        room={"n1": 1},
    )
    assert [ask.algorithm for ask in two.asked[before:]] == ["mine", ""]
    assert "A: 2 workers on n1, allowed are 1; the built-in one" in two.told[-1].reason


# ---- plans that are refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ({"A": {"n1": 5}}, "5 workers on 4 slots"),
        ({"A": {"n7": 1}}, "1 worker on 'n7'"),
        ({"B": {"n1": 1}}, "there is no job 'B'"),
        ({"A": {"n1": 1}}, "1 worker, allowed are 2 to all"),
    ],
)
def test_a_plan_out_of_bounds_is_refused_by_name_and_the_built_in_algorithm_asked(
    workers: dict[str, dict[str, int]], why: str
) -> None:
    brain = Brain({"n1": 4}, algorithm="mine")
    brain.plans = [workers]
    brain.report("A", least=2)
    assert [ask.algorithm for ask in brain.asked] == ["mine", ""]
    assert brain.asked[1].view.event == "job arrived"
    (line,) = [told.reason for told in brain.told if told.what.name == "plan_refused"]
    assert line.startswith("algorithm mine: its plan is out of bounds: ")
    assert why in line
    brain.send(Planned(brain.asked[1].request, fair(brain.asked[1].view)))
    assert brain.grants == {"A": {"n1": 4}}


def test_an_algorithm_that_fails_is_named_and_the_built_in_one_is_asked_again_later() -> None:
    brain = Brain({"n1": 4}, algorithm="mine")
    brain.report("A")
    brain.send(PlanFailed(1, "raised ValueError: no"))
    brain.send(PlanFailed(1, "an answer that comes twice"))
    lines = [told.reason for told in brain.told if told.what.name == "plan_refused"]
    assert lines == ["algorithm mine: raised ValueError: no; the built-in one is asked instead"]
    brain.now += ANSWER_S
    brain.report("A")
    assert "algorithm fair: no answer within 30 s" in brain.told[-1].reason
    brain.plans = [{"A": {"n1": 4}}]
    brain.now += RETRY_S
    brain.report("A")
    assert brain.grants == {"A": {"n1": 4}}


def test_a_plan_for_a_state_that_is_over_is_asked_for_again() -> None:
    brain = Brain({"n1": 4})
    brain.report("A")
    brain.report("B")
    assert len(brain.asked) == 1, "one at a time"
    brain.plans = [{"A": {"n1": 2}, "B": {"n1": 2}}]
    brain.send(Planned(1, Plan(workers={"A": {"n1": 4}}, reason="B was not there yet")))
    assert brain.grants == {"A": {"n1": 2}, "B": {"n1": 2}}


# ---- the next Brain ------------------------------------------------------------------------


def restarted(brain: Brain, after: float = 0.0) -> None:
    brain.now += after
    brain.cluster = Cluster.restored(brain.cluster.snapshot())
    brain.grants = {}
    brain.send(Tick())  # the kernel's first one, by which the machine learns the time
    assert not brain.grants
    brain.hosts({"n1": 2, "n2": 2})


def test_a_restarted_brain_plans_when_it_has_heard_of_each_job_with_slots(two: Brain) -> None:
    restarted(two, after=100.0)
    before = len(two.asked)
    numbers = dict(two.numbers)
    two.report("A", carried_out=numbers["A"], holding={"n1": 2})
    assert two.grants == {"A": {"n1": 2}}, "it may not have been published before"
    assert len(two.asked) == before
    two.plans = [{"A": {"n1": 1}, "B": {"n2": 2, "n1": 1}}]
    two.report("B", carried_out=numbers["B"], holding={"n2": 2})
    assert len(two.asked) == before + 1
    assert min(two.numbers.values()) >= min(numbers.values())
    two.carried_out("A")
    assert two.grants["B"] == {"n2": 2, "n1": 1}
    assert two.numbers["B"] > max(numbers.values())


def test_a_restarted_brain_plans_without_a_job_that_it_does_not_hear_but_not_with_its_slots(
    two: Brain,
) -> None:
    two.ended = {"B"}
    restarted(two, after=100.0)
    before = len(two.asked)
    two.report("A", carried_out=two.numbers["A"], holding={"n1": 2})
    two.send(Tick(), after=JOB_LEASE_S - 0.1)
    assert len(two.asked) == before
    two.plans = [{"A": {"n1": 1}}]
    two.now += 0.1
    two.carried_out("A")
    assert two.asked[-1].view.hosts == (HostView(name="n1", slots=2),)
    two.plans = [{"A": {"n1": 2, "n2": 2}}]
    two.now += LIVES_ON_S
    two.carried_out("A")
    assert two.grants == {"A": {"n1": 2, "n2": 2}}


def test_what_a_job_of_a_forgotten_brain_holds_counts_as_granted() -> None:
    brain = Brain({"n1": 4})
    proved = Proved(number=70, hosts={"n1": 3}, claims={"n1": 4})
    brain.report("A", proved, carried_out=70, holding={"n1": 4})
    assert brain.cluster.jobs["A"].claims() == {"n1": 4}
    brain.plans = [{"A": {"n1": 2}, "B": {"n1": 2}}]
    brain.report("B")
    brain.send(Planned(1, Plan(workers={}, reason="late")))
    assert brain.grants == {"A": {"n1": 2}, "B": {}}
    assert brain.numbers["A"] > 70


# ---- what algorithms see -------------------------------------------------------------------


def test_figures_of_hosts_are_in_the_view_while_they_are_new(two: Brain) -> None:
    two.send(HostsMeasured((HostView(name="n1", slots=2, cpu=0.5), HostView(name="x", slots=1))))
    two.report("A", weight=2.0)
    view = two.asked[-1].view
    assert view.hosts == (HostView(name="n1", slots=2, cpu=0.5), HostView(name="n2", slots=2))
    assert view.event == "limits changed"
    assert [(job.name, job.size, job.at) for job in view.jobs] == [
        ("A", 2, {"n1": 2}),
        ("B", 2, {"n2": 2}),
    ]


def five_hosts() -> World:
    world = World({"n1": 2, "n2": 2, "n3": 2, "n4": 1, "n5": 1})
    world.add("A", lambda size: 5.0 * size)
    world.add("B", lambda size: 5.0 * min(size, 2))
    world.add("C", lambda size: 5.0 * FALLING[size])
    return world


def test_three_jobs_find_their_sizes_by_trying_and_two_get_the_slots_of_the_third() -> None:
    world = five_hosts()
    world.run(world.now + 60.0)
    assert world.sizes() == {"A": 3, "B": 2, "C": 3}
    world.run(world.now + 300.0)
    assert world.sizes() == {"A": 3, "B": 2, "C": 3}
    assert len(world.published) <= 15
    world.end(world.jobs["C"])
    world.run(world.now + 5.0)
    assert world.sizes() == {"A": 6, "B": 2}


def test_a_job_that_gets_slower_is_measured_anew_and_its_slots_go_to_the_other() -> None:
    world = five_hosts()
    world.end(world.jobs["C"])
    world.end(world.jobs["B"])
    world.add("D", lambda size: 5.0 * size)
    world.run(world.now + 60.0)
    assert world.sizes() == {"A": 4, "D": 4}
    world.jobs["A"].count(world.now)
    world.jobs["A"].curve = lambda size: 2.0 * min(size, 2)
    world.run(world.now + 300.0)
    assert world.sizes() == {"A": 2, "D": 6}
    events = [view.event for view in world.views]
    assert "slowdown" in events


def _names(view: View) -> list[str]:
    return [job.name for job in view.jobs]


def test_jobs_are_in_the_view_in_order_of_arrival() -> None:
    world = five_hosts()
    world.run(world.now + 3.0)
    assert _names(world.views[-1]) == ["A", "B", "C"]


ALONE = {
    "linear": [1, 2, 3, 4, 5, 6, 7, 8],
    "flat": [1, 1, 1, 1, 1, 1, 1, 1],
    "saturating": [1, 1.67, 2.14, 2.5, 2.78, 3, 3.18, 3.33],
    "saturating early": [1, 1.33, 1.5, 1.6, 1.67, 1.71, 1.75, 1.78],
    "best with 2": [1, 1.7, 1.2, 1, 0.9, 0.8, 0.7, 0.6],
    "best with 3": [1, 1.8, 2.4, 2.2, 2, 1.7, 1.4, 1.2],
    "best with 5": [1, 2, 3, 3.8, 4.2, 3.9, 3.5, 3],
    "best with 6": [1, 2, 3, 4, 4.8, 5.5, 5, 4.5],
    "best with 7": [1, 2, 3, 4, 4.8, 5.5, 6, 5],
    "a dip with the second host": [1, 2, 2.9, 3.8, 3.2, 3.9, 4.6, 5.2],
    "a deep dip with the second host": [1, 2, 2.9, 3.7, 2.5, 3, 3.5, 4],
    "slower with each worker": [1, 0.81, 0.72, 0.66, 0.62, 0.58, 0.56, 0.54],
}


@pytest.mark.parametrize("curve", ALONE.values(), ids=ALONE)
def test_a_job_alone_finds_a_size_within_5_percent_of_the_best_in_a_minute_and_stays(
    curve: list[float],
) -> None:
    world = World({"n1": 4, "n2": 4})
    job = world.add("A", lambda size: 10 * curve[size - 1])
    world.run(world.now + 60.0)
    assert curve[job.size - 1] >= 0.95 * max(curve)
    changes = len(world.published) - 1
    assert changes <= 6
    world.run(world.now + 600.0)
    assert len(world.published) - 1 <= changes + 1
    assert curve[job.size - 1] >= 0.95 * max(curve)
