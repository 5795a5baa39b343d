"""The goodput ledger: every second of every slot has one class, and the sums are the log's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.features.goodput.ledger import CLASSES, Ledger, read_ledger
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.kernel.tables import SnapshotError
from elastic_driver.words.log_lines import LogLine, line_of, read_line


class Log:
    """An event log of a job, written by hand; `t` counts from the job's beginning."""

    def __init__(self, *, min_np: int = 1, max_np: int | None = None, **hosts: int) -> None:
        self.ledger = Ledger()
        self.say(0.0, "job_started", min_np=min_np, max_np=max_np)
        for host, slots in hosts.items():
            self.say(0.0, "host_discovered", host=host, slots=slots)

    def say(self, t: float, event: str, worker: str = "", **facts: Any) -> None:
        if worker:
            host, slot, _ = worker.split(".")
            facts |= {"worker": worker, "host": host, "slot": int(slot)}
        self.ledger.feed(line_of(event, t, facts))

    def all(self, t: float, event: str, *workers: str, **facts: Any) -> None:
        for worker in workers:
            self.say(t, event, worker, **facts)

    def start(self, *workers: str) -> None:
        """They are started at 2, ready at 5, in a round from 6 on, and train from 7 on."""
        self.all(2.0, "worker_started", *workers)
        self.all(5.0, "worker_ready", *workers)
        self.say(6.0, "round_completed", size=len(workers))
        self.say(8.0, "state_synced", workers[0], seconds=1.0, first_step=1)

    def seconds(self, now: float) -> dict[str, float]:
        document = self.ledger.document(now)
        whole = document["slots"] * document["wall"]
        assert sum(document["seconds"].values()) == pytest.approx(whole, rel=1e-6, abs=1e-5)
        return {name: s for name, s in document["seconds"].items() if s}


def test_a_job_starts_forms_a_round_takes_over_the_state_and_trains() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    times = {"starting": 10.0, "forming": 2.0, "syncing": 2.0, "training": 6.0}
    assert log.seconds(10.0) == pytest.approx(times)
    assert log.ledger.document(10.0)["goodput"] == pytest.approx(0.3)
    assert log.ledger.document(10.0)["slots"] == pytest.approx(2.0)


def test_a_worker_from_a_warm_process_may_be_ready_before_its_start_is_known() -> None:
    log = Log(a=1)
    log.say(1.0, "worker_ready", "a.0.1")
    log.say(2.0, "worker_started", "a.0.1")
    assert log.seconds(3.0) == pytest.approx({"starting": 1.0, "forming": 2.0})


def test_what_a_loss_undoes_is_lost_on_the_slots_of_survivors_and_of_the_dead() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(20.0, "worker_exited", "a.1.1", exit_code=-9)
    # The survivor has noticed it a second later, and its last commit was two seconds before that.
    log.say(21.0, "worker_ready", "a.0.1", undone=3.0)
    log.say(22.0, "worker_started", "a.1.2")
    seconds = log.seconds(24.0)
    assert seconds["training"] == pytest.approx(2 * 11.0)  # from 7 to 18
    assert seconds["lost"] == pytest.approx(3.0 + 2.0)
    assert seconds["starting"] == pytest.approx(10.0 + 2.0 + 2.0)
    assert log.ledger.failures == 1


def test_a_survivor_that_is_ready_before_the_end_of_the_dead_is_known_counts_the_same() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(19.0, "worker_ready", "a.0.1", undone=1.0)
    log.say(20.0, "worker_lost", "a.1.1")
    seconds = log.seconds(20.0)
    assert (seconds["training"], seconds["lost"]) == pytest.approx((2 * 11.0, 1.0 + 2.0))


def test_a_worker_whose_process_ends_after_the_others_have_gone_on_is_one_failure() -> None:
    log = Log(a=3)
    log.start("a.0.1", "a.1.1", "a.2.1")
    log.all(10.0, "worker_ready", "a.0.1", "a.1.1", undone=0.0)
    log.say(10.0, "worker_left", "a.2.1")
    log.say(10.0, "round_completed", size=2)
    log.say(11.0, "worker_exited", "a.2.1", exit_code=1)
    assert log.ledger.failures == 1
    assert log.ledger.workers == 2


def test_a_worker_that_has_finished_alone_breaks_the_round_but_has_not_failed() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "worker_ready", "a.0.1", undone=0.0)
    log.say(10.0, "worker_left", "a.1.1", failed=False)
    log.say(10.0, "round_completed", size=1)
    log.say(11.0, "worker_exited", "a.1.1", exit_code=0)
    assert log.ledger.failures == 0
    assert log.ledger.workers == 1


def test_a_worker_whose_script_was_over_but_whose_process_fails_is_one_failure() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "worker_ready", "a.0.1", undone=0.0)
    log.say(10.0, "worker_left", "a.1.1", failed=False)
    log.say(10.0, "round_completed", size=1)
    log.say(11.0, "worker_exited", "a.1.1", exit_code=1)
    assert log.ledger.failures == 1
    assert log.ledger.workers == 1, "the round of the others goes on"


@pytest.mark.parametrize("end", ["worker_exited", "worker_lost", "worker_hung"])
def test_a_worker_whose_script_has_failed_is_one_failure_however_its_process_ends(end: str) -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "worker_ready", "a.0.1", undone=0.0)
    log.say(10.0, "worker_left", "a.1.1")
    log.say(10.0, "round_completed", size=1)
    log.ledger = Ledger.restored(log.ledger.snapshot())
    log.say(11.0, end, "a.1.1", **({"exit_code": 0, "lost": True} if "exit" in end else {}))
    assert log.ledger.failures == 1
    assert "lost" not in log.seconds(12.0), "the job does not finish"


def test_a_newcomer_that_exits_0_has_failed_and_does_not_finish_the_job() -> None:
    log = Log(a=2)
    log.start("a.0.1")
    log.say(10.0, "worker_started", "a.1.1")
    log.say(11.0, "worker_exited", "a.1.1", exit_code=0, lost=True)
    assert log.ledger.failures == 1
    assert "lost" not in log.seconds(12.0)


def test_steps_that_were_trained_before_are_redone() -> None:
    log = Log(a=1)
    log.start("a.0.1")
    log.say(20.0, "worker_exited", "a.0.1", exit_code=1)
    log.say(20.0, "round_closed", step=30)
    log.say(21.0, "worker_started", "a.0.2")
    log.say(22.0, "worker_ready", "a.0.2")
    log.say(22.0, "round_completed", size=1)
    log.say(24.0, "state_synced", "a.0.2", seconds=1.0, first_step=11)
    log.say(30.0, "steps_redone", "a.0.2")
    assert log.seconds(31.0)["redone"] == pytest.approx(7.0)
    assert log.ledger.steps_redone == 20


def test_slots_without_a_usable_host_wait_and_so_do_workers_that_are_too_few() -> None:
    log = Log(min_np=2, a=1, b=1)
    log.start("a.0.1", "b.0.1")
    log.say(10.0, "worker_lost", "b.0.1")
    log.say(10.0, "host_unreachable", host="b")
    log.say(10.0, "worker_ready", "a.0.1", undone=0.0)
    log.say(15.0, "host_resurrected", host="b")
    seconds = log.seconds(16.0)
    assert seconds["waiting"] == pytest.approx(5.0 + 5.0)
    assert seconds["forming"] == pytest.approx(2.0 + 1.0)


def test_the_slots_aimed_at_follow_the_hosts_the_wanted_number_and_drains() -> None:
    log = Log(min_np=2, max_np=3, a=2, b=2)
    assert sum(log.seconds(1.0).values()) == pytest.approx(3.0)  # at most three are wanted
    log.say(1.0, "scale_requested", wanted=4)
    assert sum(log.seconds(2.0).values()) == pytest.approx(3.0 + 4.0)
    log.say(2.0, "host_drained", host="b")
    assert sum(log.seconds(3.0).values()) == pytest.approx(7.0 + 2.0)
    log.say(3.0, "host_removed", host="a")  # two are needed all the same
    assert log.seconds(4.0)["waiting"] == pytest.approx(2.0)


def test_a_slow_rank_takes_its_share_of_the_seconds_of_all() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "rank_slow", "a.1.1", ratio=4.0)
    log.say(14.0, "rank_recovered", "a.1.1")
    seconds = log.seconds(20.0)
    assert (seconds["slow"], seconds["training"]) == pytest.approx((6.0, 20.0))


def test_a_slow_rank_tells_its_share_of_a_step() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "rank_slow", "a.1.1", ratio=4.0, share=0.25)
    log.say(14.0, "rank_recovered", "a.1.1")
    seconds = log.seconds(20.0)
    assert (seconds["slow"], seconds["training"]) == pytest.approx((2.0, 24.0))


def test_a_plain_script_trains_from_its_round_on_until_one_of_its_workers_fails() -> None:
    log = Log(a=2)
    log.all(2.0, "worker_started", "a.0.1", "a.1.1")
    log.say(4.0, "round_completed", size=2)
    log.say(10.0, "worker_exited", "a.0.1", exit_code=1)
    log.say(11.0, "worker_exited", "a.1.1", exit_code=-15, expected=True)
    assert log.seconds(12.0) == pytest.approx({"starting": 11.0, "training": 12.0, "lost": 1.0})


def test_a_plain_script_has_trained_since_all_its_processes_were_started() -> None:
    log = Log(a=2)
    log.all(2.0, "worker_started", "a.0.1", "a.1.1")
    log.say(3.0, "processes_started", size=2)
    assert log.seconds(12.0) == pytest.approx({"starting": 24.0})
    log.say(13.0, "round_completed", size=2)
    assert log.seconds(14.0) == pytest.approx({"starting": 6.0, "training": 22.0})


def test_a_short_plain_script_has_trained_though_it_ends_before_its_kind_is_known() -> None:
    log = Log(a=2)
    log.all(2.0, "worker_started", "a.0.1", "a.1.1")
    log.say(3.0, "processes_started", size=2)
    log.say(5.0, "worker_exited", "a.1.1", exit_code=0)
    log.say(5.0, "round_completed", size=2)
    log.say(5.5, "worker_exited", "a.0.1", exit_code=0)
    log.say(5.5, "job_succeeded")
    assert log.seconds(9.0) == pytest.approx({"starting": 6.0, "training": 4.5, "lost": 0.5})


def test_a_plain_script_that_fails_soon_has_trained_until_then() -> None:
    log = Log(a=2)
    log.all(2.0, "worker_started", "a.0.1", "a.1.1")
    log.say(3.0, "processes_started", size=2)
    log.say(7.0, "worker_exited", "a.1.1", exit_code=1)
    assert log.ledger.failures == 1
    assert log.seconds(7.0) == pytest.approx({"starting": 6.0, "training": 8.0})
    log.say(7.5, "worker_exited", "a.0.1", exit_code=-15, expected=True)
    log.say(7.5, "job_failed")
    times = {"starting": 6.5, "training": 8.0, "lost": 0.5}
    assert log.seconds(9.0) == pytest.approx(times)


def test_an_elastic_script_does_not_train_while_its_processes_start() -> None:
    log = Log(a=1)
    log.say(2.0, "worker_started", "a.0.1")
    log.say(3.0, "processes_started", size=1)
    log.say(5.0, "worker_ready", "a.0.1")
    log.say(6.0, "round_completed", size=1)
    log.say(8.0, "state_synced", "a.0.1", seconds=2.0)
    times = {"starting": 5.0, "forming": 1.0, "training": 4.0}
    assert log.seconds(10.0) == pytest.approx(times)


def test_slots_of_workers_that_have_finished_get_no_other_ones() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "worker_exited", "a.0.1", exit_code=0)
    log.say(12.0, "worker_exited", "a.1.1", exit_code=0)
    log.say(13.0, "job_succeeded")
    assert log.seconds(99.0)["lost"] == pytest.approx(3.0 + 1.0)
    assert log.ledger.document(99.0)["wall"] == pytest.approx(13.0)


def test_slots_of_a_job_that_ends_are_not_filled_again() -> None:
    log = Log(a=1)
    log.start("a.0.1")
    log.say(10.0, "worker_exited", "a.0.1", exit_code=-15, expected=True, job_over=True)
    log.say(12.0, "job_failed")
    assert log.seconds(12.0)["lost"] == pytest.approx(2.0)
    assert log.ledger.failures == 0


def test_a_worker_whose_end_no_log_has_is_forgotten_in_the_next_round() -> None:
    log = Log(a=2)
    log.start("a.0.1", "a.1.1")
    log.say(10.0, "driver_resumed")
    log.say(10.0, "worker_ready", "a.0.1", undone=1.0)
    log.say(11.0, "round_completed", size=1)
    assert log.ledger.workers == 1
    assert log.seconds(12.0)["starting"] == pytest.approx(10.0 + 1.0)


def test_counters_never_go_back_though_time_is_moved_afterwards() -> None:
    log = Log(a=1)
    log.start("a.0.1")
    before = log.ledger.counters(20.0)["training"]
    log.say(20.0, "worker_ready", "a.0.1", undone=5.0)
    assert log.ledger.counters(20.0)["training"] == before
    assert log.seconds(20.0)["training"] == pytest.approx(8.0)


def test_a_log_file_gives_the_ledger_of_its_last_run() -> None:
    lines = [b'{"n":1,"t":1.0,"event":"job_started","min_np":1}', b'{"n":2,"t":', b"[]", b"\xff"]
    lines += [b'{"n":1,"t":50.0,"event":"job_started"}', b'{"t":60.5,"event":"job_failed"}']
    assert read_ledger(lines).wall(99.0) == pytest.approx(10.5)
    assert [read_line(line) is None for line in lines] == [False, True, True, True, False, False]


def test_a_ledger_that_comes_back_from_a_snapshot_goes_on_like_the_first_one() -> None:
    log = Log(min_np=1, a=2)
    log.start("a.0.1", "a.1.1")
    twin = Ledger.restored(log.ledger.snapshot())
    facts = {"worker": "a.1.1", "host": "a", "slot": 1, "exit_code": -9, "rank": None}
    log.say(20.0, "worker_exited", "a.1.1", exit_code=-9)
    twin.feed(line_of("worker_exited", 20.0, facts))
    assert twin.document(30.0) == log.ledger.document(30.0)
    assert line_of("worker_exited", 20.0, {"slot": "none"}) is None
    with pytest.raises(SnapshotError, match="snapshot of a"):
        Ledger.restored(DataSets().snapshot())


WORKERS = [f"{host}.{slot}.{number}" for host in "ab" for slot in (0, 1) for number in (1, 2)]
_ABOUT_WORKERS = ("worker_started", "worker_ready", "worker_exited", "worker_lost", "worker_hung")
_ABOUT_HOSTS = ("host_discovered", "host_removed", "host_blacklisted", "host_unreachable")
_HOSTS_TOO = (
    "host_resurrected",
    "host_refused",
    "agent_started",
    "host_drained",
    "drain_cancelled",
)
_ABOUT_ALL = (
    "round_completed",
    "round_closed",
    "scale_requested",
    "plan_applied",
    "steps_redone",
    "driver_resumed",
)
_RANKS = ("rank_slow", "rank_recovered", "state_synced", "spare_promoted")
_SECONDS = st.floats(0.0, 50.0, allow_subnormal=False)


@st.composite
def log_lines(draw: st.DrawFn) -> LogLine:
    """A line of any kind, at any time, also an earlier one than the line before."""
    kinds = (*_ABOUT_WORKERS, *_ABOUT_HOSTS, *_HOSTS_TOO, *_ABOUT_ALL, *_RANKS)
    event, few = draw(st.sampled_from(kinds)), st.integers(0, 5)
    facts: dict[str, Any] = {}
    if event in (*_ABOUT_WORKERS, *_RANKS):
        facts["worker"] = draw(st.sampled_from(WORKERS))
        facts["host"], facts["slot"] = facts["worker"][0], int(facts["worker"][2])
    elif event not in _ABOUT_ALL:
        facts["host"] = draw(st.sampled_from("ab"))
    numbers = ("size", "slots", "wanted", "step", "first_step")
    facts |= {name: draw(few) for name in numbers} | {"exit_code": draw(st.sampled_from((0, 1)))}
    times: dict[str, Any] = {
        "undone": draw(_SECONDS),
        "seconds": draw(_SECONDS),
        "ratio": draw(_SECONDS),
    }
    times |= {"share": draw(st.none() | st.floats(-1.0, 2.0))}
    expected = draw(st.booleans())
    line = line_of(event, draw(_SECONDS), {**facts, **times, "expected": expected})
    assert line is not None
    return line


@settings(deadline=None)
@given(st.lists(log_lines(), max_size=40), st.integers(1, 5), st.none() | st.integers(1, 5))
def test_any_lines_in_any_order_sum_up(lines: list[LogLine], least: int, most: int | None) -> None:
    ledger, whole, before = Ledger(), 0.0, 0.0
    ledger.feed(line_of("job_started", 0.0, {"min_np": least, "max_np": most}))
    for line in lines:
        # An independent count: as many slots as there are between two lines.
        slots = ledger.document(before + 1.0)
        now = max(before, line.t)
        whole += (sum(slots["seconds"].values()) - sum(ledger.seconds.values())) * (now - before)
        ledger.feed(line)
        before = now
        assert set(ledger.seconds) == set(CLASSES)
        assert all(value >= -1e-9 for value in ledger.seconds.values())
        assert sum(ledger.seconds.values()) == pytest.approx(whole, abs=1e-4)
