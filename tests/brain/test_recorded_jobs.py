"""Recorded jobs, played through algorithms that are easy to follow."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

from elastic_driver.brain.algorithm import HostView, Plan, SpeedAt, View
from elastic_driver.brain.fair import fair
from elastic_driver.brain.grants import Kind
from elastic_driver.brain.recorded_jobs import CHANGE_S, Recorded, best_possible, comparison, play
from elastic_driver.brain.store.records import Record

HOSTS = (HostView(name="n1", slots=4), HostView(name="n2", slots=4))


def job(
    name: str,
    *speeds: tuple[int, int, float],
    began: float = 0.0,
    seconds: float = 1000.0,
    trained: float = 1000.0,
) -> Recorded:
    """A job with batches of each worker's own; its speeds are sizes, hosts and step times."""
    measured = tuple(SpeedAt(size=n, hosts=h, step_time=t) for n, h, t in speeds)
    record = Record(Kind(name=name, command="c"), speeds=measured, ended=began + seconds)
    return Recorded(name, began, began + seconds, record, trained, 10.0)


ONE = job("one", (1, 1, 1.0), (2, 1, 1.0), (4, 1, 1.25))


def all_of_one_host(view: View) -> Plan:
    """Each job has a host of its own, in the order of their names."""
    names = sorted(each.name for each in view.jobs)
    return Plan(
        workers={
            name: {host.name: host.slots} for name, host in zip(names, view.hosts, strict=False)
        },
        reason=view.event,
    )


def one_worker_each(view: View) -> Plan:
    slots = [host.name for host in view.hosts for _ in range(host.slots)]
    return Plan(
        workers={each.name: {host: 1} for each, host in zip(view.jobs, slots, strict=False)},
        reason=view.event,
    )


def test_a_job_trains_as_fast_as_it_was_measured() -> None:
    found = play([ONE], HOSTS, one_worker_each)
    assert found.jobs[0].trained == pytest.approx(1000.0 - CHANGE_S)
    assert found.jobs[0].changes == 0
    found = play([ONE], HOSTS, all_of_one_host)
    assert found.jobs[0].trained == pytest.approx((1000.0 - CHANGE_S) * 4 / 1.25)
    assert found.jobs[0].extrapolated == ()
    assert found.refused == ()


def test_the_best_possible_is_the_fastest_measured_size_all_the_time() -> None:
    assert best_possible(ONE, 8) == pytest.approx(3200.0)
    assert best_possible(ONE, 2) == pytest.approx(2000.0)


def test_a_size_that_was_not_measured_is_extrapolated_and_marked() -> None:
    linear = job("linear", (1, 1, 1.0), (2, 1, 1.0))
    found = play([linear], HOSTS, all_of_one_host)
    assert found.jobs[0].extrapolated == ((4, 1),)
    assert found.jobs[0].trained == pytest.approx(4000.0, rel=0.05)
    text = comparison([linear], ["gone"], HOSTS, {"hosts": found})
    assert "*: was at sizes that were not measured" in text
    assert "linear: extrapolated sizes (workers on hosts): 4 on 1" in text
    assert "left out, not measured or not ended: gone" in text


def test_an_algorithm_sees_what_was_measured_by_then_and_why_it_is_asked() -> None:
    asked: list[tuple[float, str, dict[str, tuple[int, ...]]]] = []

    def watches(view: View) -> Plan:
        sizes = {each.name: tuple(s.size for s in each.speeds) for each in view.jobs}
        asked.append((view.now, view.event, sizes))
        return one_worker_each(view)

    later = job("two", (1, 1, 0.5), began=100.0, seconds=50.0)
    play([later, ONE], HOSTS, watches)
    assert [(now, event, sizes) for now, event, sizes in asked if event != "time passed"] == [
        (0.0, "job arrived", {"one": ()}),
        (pytest.approx(25.0 + CHANGE_S), "size measured", {"one": (1,)}),
        (100.0, "job arrived", {"one": (1,), "two": ()}),
        (pytest.approx(112.5 + CHANGE_S), "size measured", {"one": (1,), "two": (1,)}),
        (150.0, "slots freed", {"one": (1,)}),
    ]
    assert [now for now, event, _ in asked if event == "time passed"] == [
        pytest.approx(86.0 + CHANGE_S),
        211.0,
    ]


def test_a_job_that_is_moved_loses_time_and_its_changes_are_counted() -> None:
    def grows(view: View) -> Plan:
        size = 2 if view.now < 500.0 else 4
        return Plan(workers={each.name: {"n1": size} for each in view.jobs}, reason="")

    other = job("other", (2, 1, 1.0), (4, 1, 1.0), began=500.0, seconds=1.0)
    found = play([ONE, other], (HostView(name="n1", slots=8),), grows)
    assert found.jobs[0].changes == 1
    trained = 2 * (500.0 - CHANGE_S) + 3.2 * (500.0 - CHANGE_S)
    assert found.jobs[0].trained == pytest.approx(trained)


def test_a_plan_that_breaks_a_limit_is_refused_and_the_jobs_stay() -> None:
    def too_many(view: View) -> Plan:
        if view.now > 500.0:
            return Plan(workers={"one": {"n1": 9}}, reason="")
        return one_worker_each(view)

    other = job("other", (1, 1, 1.0), began=600.0, seconds=1.0)
    found = play([ONE, other], HOSTS, too_many)
    assert found.jobs[0].trained == pytest.approx(1000.0 - CHANGE_S)
    assert found.jobs[1].trained == 0.0
    assert "n1: 9 workers on 4 slots" in found.refused
    text = comparison([ONE, other], [], HOSTS, {"x": found})
    assert "plans refused: " in text


def test_the_comparison_counts_in_samples_and_is_the_same_each_time() -> None:
    jobs = [ONE, job("two", (1, 1, 0.5), (4, 1, 1.0), (8, 2, 3.0), began=10.0, trained=500.0)]

    def text() -> str:
        plays = {
            "one": play(jobs, HOSTS, one_worker_each),
            "all": play(jobs, HOSTS, all_of_one_host),
        }
        return comparison(jobs, [], HOSTS, plays)

    found = text()
    assert found == text()
    lines = found.splitlines()
    assert lines[0] == "2 jobs on 8 slots (n1:4, n2:4)"
    assert lines[2].split() == [
        *("job", "counted", "in", "recorded", "best", "possible", "one", "all"),
    ]
    assert lines[3].split() == ["one", "samples", "10000", "32000", "9997", "31990"]
    assert lines[6].startswith("one: ")
    assert lines[6].endswith("(means of the jobs); changes: 0")


def test_the_built_in_algorithm_is_better_than_a_host_for_each_job() -> None:
    peaked = job("peaked", (1, 1, 1.0), (2, 1, 1.1), (3, 1, 1.25), (4, 1, 2.0), seconds=2000.0)
    grows = job("grows", *((n, 1 + (n > 4), 1.0) for n in range(1, 9)), seconds=2000.0)
    found = play([peaked, grows], HOSTS, fair)
    halves = play([peaked, grows], HOSTS, all_of_one_host)
    assert found.refused == ()
    gains = [
        ours.trained / half.trained for ours, half in zip(found.jobs, halves.jobs, strict=True)
    ]
    assert sum(gains) / 2 > 1.1
    assert 2 <= sum(each.changes for each in found.jobs) <= 12
