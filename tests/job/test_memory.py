"""Workers that run out of memory: where they are started again, and when the job ends."""

from __future__ import annotations

import pytest

from elastic_driver.job.events import HostsGranted, HostsMeasured
from elastic_driver.job.supply import in_words
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

MIB = 2**20


def ran_out(s: Scenario, worker: str, peak: int | None, **facts: object) -> None:
    """The worker is killed at this peak (MiB); `idle` on its host is in MiB too."""
    size = None if peak is None else peak * MIB
    idle = facts.pop("idle", None)
    left = idle * MIB if isinstance(idle, int) else None
    code = int(str(facts.pop("code", -9)))
    found = ev.OutOfMemory(size, left, **facts)  # type: ignore[arg-type]
    s.send(ev.WorkerExited(worker, code, "", out_of_memory=found))


def measured(s: Scenario, **idle: int) -> None:
    s.send(HostsMeasured(tuple((host, mib * MIB) for host, mib in idle.items())))


def restart(s: Scenario) -> None:
    """The members meet again, and then with the workers that were started meanwhile."""
    s.ready(*s.in_state("running"), version=1)
    s.wait(2.0)
    if s.round[1] == "complete":
        s.step(*s.members, step=2)
    s.ready(*s.starting)
    s.wait(1.0)
    if s.round[1] == "closing":
        s.ready(*s.in_state("running"), version=2)
    s.step(*s.members, step=3)


def where(s: Scenario) -> list[str]:
    """The hosts of the newest world's members."""
    return sorted(member.place.host for member in s.world.members)


def test_a_worker_goes_to_a_host_where_half_as_much_again_as_its_peak_is_idle(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2).training(a=1, b=1, c=1)
    measured(s, a=900, b=900, c=2000)
    ran_out(s, s.members[0], 1000, idle=900)
    restart(s)
    assert where(s) == ["b", "c"]
    assert s.end is None
    (told,) = s.announced("out_of_memory")
    assert told.reason == "its peak was 1000 MiB; a has the memory for 0 workers"
    assert told.what.facts() == {"peak": 1000 * MIB, "room": 0}


def test_the_host_is_not_blamed(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2, host_failures=1).training(a=2, b=2)
    measured(s, a=900, b=2000)
    ran_out(s, s.members[0], 1000, idle=900)
    restart(s)
    assert s.announced("host_blacklisted") == []
    assert where(s) == ["a", "b"]


def test_a_worker_stays_on_a_host_with_memory_enough(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2).training(a=2)
    measured(s, a=100)
    ran_out(s, s.members[0], 1000, idle=1500)
    restart(s)
    assert where(s) == ["a", "a"]


def test_the_second_time_a_host_gets_no_other_worker_for_it(scenario: MakeScenario) -> None:
    """A limit of one process, which leaves the host's memory idle, must not be met for ever."""
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2)
    ran_out(s, s.members[0], 1000, idle=4000, code=1)
    restart(s)
    assert where(s) == ["a", "a"]
    ran_out(s, s.members[1], 1000, idle=4000, code=1)
    restart(s)
    assert where(s) == ["a"]
    assert s.end is None


def test_workers_that_run_out_together_are_one_incident(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1, max_np=3).training(a=3)
    for worker, idle in zip(s.members, (0, 1500, 3000), strict=True):
        ran_out(s, worker, 1000, idle=idle)
    assert s.job.limits.room == {"a": 2}
    s.wait(2.0)
    s.ready(*s.starting)
    assert where(s) == ["a", "a"]
    assert s.end is None


def test_workers_that_fill_their_host_together_go_on_as_one(scenario: MakeScenario) -> None:
    """The kernel may kill all of them before the memory of the first is free."""
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2)
    for worker, idle in zip(s.members, (600, 1400), strict=True):
        ran_out(s, worker, 1000, idle=idle)
    assert s.job.limits.room == {"a": 1}
    s.wait(2.0)
    s.ready(*s.starting)
    s.step(*s.members)
    assert where(s) == ["a"]
    ran_out(s, s.members[0], 1390, idle=1400)
    assert s.end is not None
    assert "no host has 2085 MiB idle: the largest, a, has 1400 MiB" in s.end.reason


def test_the_last_of_several_is_alone_once_the_job_trains_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2)
    ran_out(s, s.members[0], 1000, idle=600)
    restart(s)
    ran_out(s, s.members[0], 1390, idle=1400)
    assert s.end is not None


def test_a_limit_of_one_process_is_named_where_the_host_has_memory_enough(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1)
    ran_out(s, s.members[0], 1000, idle=4000, code=1)
    s.wait(2.0)
    s.ready(*s.starting)
    s.step(*s.members)
    ran_out(s, s.members[0], 1000, idle=4000, code=1)
    assert s.end is not None
    assert s.end.exit_code == 1
    assert s.end.reason.startswith(
        "rank 0 on host a ran out of memory at 1000 MiB, again, though a has 4000 MiB idle;"
    )


def test_with_room_for_fewer_the_job_goes_on_with_fewer_workers_there(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4).training(a=4)
    measured(s, a=0)
    ran_out(s, s.members[3], 1000, idle=1000)
    restart(s)
    assert where(s) == ["a", "a", "a"]
    assert s.job.hosts.known["a"].slots == 3


def test_the_job_ends_with_one_line_if_no_host_is_large_enough(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2).training(a=1, b=1)
    measured(s, a=900, b=1200)
    ran_out(s, s.members[1], 1000, idle=800)
    assert s.end is not None
    assert s.end.exit_code == 137
    said = s.end.reason.partition(";")[0]
    assert said == (
        "rank 1 on host b ran out of memory at 1000 MiB, "
        "and no host has 1500 MiB idle: the largest, a, has 900 MiB"
    )


def test_without_a_figure_the_job_ends_if_no_slot_is_left(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1)
    ran_out(s, s.members[0], None)
    assert s.end is not None
    assert "ran out of memory, and no other host has a free slot;" in s.end.reason


def test_hosts_that_nobody_has_measured_may_be_large_enough(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1, b=1)
    ran_out(s, s.members[0], 1000, idle=900)
    s.wait(2.0)
    s.ready(*s.starting)
    assert where(s) == ["b"]


def test_an_agent_that_comes_up_on_a_host_that_is_too_small_ends_the_wait(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1, agents=False)
    s.hosts(a=1, b=1)
    up = ev.AgentReady("a", 1, 7, "10.0.0.1", (5000,), memory=1000 * MIB)
    s.send(up)
    s.ready(*s.starting)
    s.step(*s.members)
    ran_out(s, s.members[0], 990, idle=950)
    assert s.end is None
    s.send(ev.AgentReady("b", 1, 8, "10.0.0.2", (5000,), memory=1200 * MIB))
    assert s.end is not None
    assert "the largest, b, has 1200 MiB" in s.end.reason


def test_hosts_that_are_lost_later_are_waited_for_as_ever(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2, elastic_timeout=50.0).training(a=1, b=1, c=1)
    measured(s, a=900, b=900, c=2000)
    ran_out(s, s.members[0], 1000, idle=900)
    restart(s)
    assert where(s) == ["b", "c"]
    s.hosts(a=1, b=1)
    s.wait(5.0)
    assert s.end is None, "c may come back"
    s.hosts(a=1, b=1, c=1)
    restart(s)
    assert where(s) == ["b", "c"]


def test_a_newcomer_without_memory_leaves_the_others_alone_for_good(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=2, max_np=3).training(a=1, b=1)
    s.hosts(a=1, b=1, c=1)
    ran_out(s, "c.0.1", 1000, idle=900)
    assert s.round == (1, "complete")
    s.hosts(a=1)
    s.wait(5.0)
    assert s.end is None, "b may come back"


def test_what_starting_workers_will_take_is_not_idle(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=3).training(a=2)
    s.hosts(a=2, b=2)
    assert s.starting == ["b.0.1"]
    measured(s, a=0, b=3000)
    ran_out(s, s.members[0], 1000, idle=0)
    assert s.job.limits.room == {"a": 1, "b": 2}


def test_a_wiped_out_job_starts_again_elsewhere_though_no_step_was_finished(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1, b=1, steps=0)
    ran_out(s, s.members[0], 1000, idle=900)
    s.wait(2.0)
    s.ready(*s.starting)
    assert where(s) == ["b"]


def test_plain_scripts_are_restarted_where_there_is_memory(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2, plain_after=1.0)
    s.hosts(a=2, b=2)
    s.wait(2.0)
    measured(s, a=500, b=4000)
    ran_out(s, s.members[1], 1000, idle=900)
    s.obey_stops()
    s.wait(2.0)
    assert where(s) == ["a", "b"]


def test_a_gpu_without_memory_changes_no_host(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2, host_failures=1).training(a=2)
    ran_out(s, s.members[0], 100_000, code=1, of_device=True)
    restart(s)
    assert where(s) == ["a", "a"]
    assert s.announced("host_blacklisted") == []
    (told,) = s.announced("out_of_memory")
    assert told.reason.startswith("the memory of its GPU was too small")


def test_an_unknown_peak_only_keeps_its_host_from_another_worker(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2, b=1)
    ran_out(s, s.members[0], None)
    restart(s)
    assert where(s) == ["a", "b"]


def test_a_worker_that_was_told_to_stop_decides_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2)
    s.send(ev.ScaleRequested(1))
    s.wait(2.0)
    s.ready(*s.in_state("running"), version=1)
    (stopping,) = s.in_state("stopping")
    ran_out(s, stopping, 1000, idle=0)
    assert s.announced("out_of_memory") == []
    assert s.job.limits.room == {}


def test_another_machine_with_the_same_name_is_not_limited(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=2, agents=False)
    s.hosts(a=2)
    s.send(ev.AgentReady("a", 1, 7, "10.0.0.1", (5000,), memory=2000 * MIB))
    s.ready(*s.starting)
    s.step(*s.members)
    ran_out(s, s.members[0], 1000, idle=0)
    assert s.job.hosts.known["a"].slots == 1
    s.agent_lost("a")
    s.wait(10.0)
    number = s.job.fleet.agents["a"].incarnation
    s.send(ev.AgentReady("a", number, 7, "10.0.0.1", (5000,), memory=9000 * MIB))
    assert s.job.hosts.known["a"].slots == 2


def test_the_limits_outlive_the_driver(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2)
    ran_out(s, s.members[0], 1000, idle=0)
    s.resume()
    s.returns("a")
    s.ready(*s.in_state("running"), version=1)
    s.wait(5.0)
    assert s.job.hosts.known["a"].slots == 1
    assert len(s.orders(msg.StartWorkerOrder)) == 2


@pytest.mark.parametrize(("size", "words"), [(950 * MIB, "950 MiB"), (2**36, "64 GiB")])
def test_sizes_are_in_words(size: int, words: str) -> None:
    assert in_words(size) == words


# ---- under the Brain, which may have larger hosts -------------------------------------------


def under_brain(scenario: MakeScenario, **settings: object) -> Scenario:
    s = scenario(**{"start_np": 2, "min_np": 2, "max_np": 2, "agents": False, **settings})
    s.send(HostsGranted(1, (("a", 1), ("b", 1)), "the test says so"))
    s.agent_up("a")
    s.agent_up("b")
    s.ready(*s.starting)
    s.wait(1.0)
    s.step(*s.members)
    return s


def test_a_job_of_the_brain_waits_for_a_larger_host(scenario: MakeScenario) -> None:
    s = under_brain(scenario)
    measured(s, a=900, b=900)
    ran_out(s, s.members[0], 1000, idle=900)
    assert s.end is None
    assert s.job.limits.memory_room() == {"a": 0, "b": 1}
    s.ready(*s.in_state("running"), version=1)
    s.wait(2.0)
    s.send(HostsGranted(2, (("b", 1), ("c", 1)), "c has the memory"))
    s.agent_up("c")
    s.ready(*s.starting)
    s.wait(1.0)
    s.step(*s.members, step=2)
    assert where(s) == ["b", "c"]
    assert s.end is None


def test_a_job_ends_when_the_brain_has_no_host_that_is_large_enough(
    scenario: MakeScenario,
) -> None:
    s = under_brain(scenario)
    measured(s, a=900, b=900)
    ran_out(s, s.members[0], 1000, idle=900)
    s.send(HostsGranted(2, (), "it waits", too_small=("n9", 1400 * MIB)))
    assert s.end is not None
    assert s.end.reason.startswith(
        "rank 0 on host a ran out of memory at 1000 MiB, "
        "and no host has 1500 MiB idle: the largest, n9, has 1400 MiB;"
    )


def test_a_job_waits_for_the_brain_no_longer_than_it_waits_for_other_hosts(
    scenario: MakeScenario,
) -> None:
    s = under_brain(scenario, elastic_timeout=60.0)
    measured(s, a=900, b=900)
    ran_out(s, s.members[0], 1000, idle=900)
    s.ready(*s.in_state("running"), version=1)
    s.wait(59.0)
    assert s.end is None
    s.wait(1.5)
    assert s.end is not None
    assert s.end.reason.startswith("rank 0 on host a ran out of memory at 1000 MiB, ")


def test_a_host_of_the_brain_that_proves_too_small_is_reported(scenario: MakeScenario) -> None:
    s = under_brain(scenario)
    measured(s, a=900, b=900)
    ran_out(s, s.members[0], 1000, idle=900)
    s.send(HostsGranted(2, (("b", 1), ("c", 1)), "nobody has measured c"))
    s.send(ev.AgentReady("c", 1, 9, "10.0.0.3", (5000,), memory=1200 * MIB))
    assert s.job.limits.memory_room() == {"a": 0, "b": 1, "c": 0}
    assert s.end is None
