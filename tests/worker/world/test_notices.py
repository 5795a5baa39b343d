"""What a notice ends: the attempt to build a group, and collectives that would not end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from elastic_driver.words.orders import Notice
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.world.device import DeviceHalf
from elastic_driver.worker.world.gloo import GroupConnections
from elastic_driver.worker.world.groups import RoundOverError
from elastic_driver.worker.world.member import (
    CHECK_S,
    HOPELESS_CHECKS,
    SILENT_GRACE_S,
    RoundNotices,
)


def test_an_attempt_gives_its_result_its_error_or_is_given_up() -> None:
    notices = RoundNotices(TrainingProgress())
    assert notices.run_attempt(3, 10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        notices.run_attempt(3, 10, lambda: 1 / 0)
    hangs = threading.Event()
    with pytest.raises(RoundOverError, match="no group within 0 s"):
        notices.run_attempt(3, 0.01, hangs.wait)
    notices.on_notice(Notice(3, None, "round 3 is over"))
    with pytest.raises(RoundOverError, match="round 3 is over"):
        notices.run_attempt(3, 10, hangs.wait)
    given_up = threading.Timer(0.05, notices.on_notice, (Notice(4, None, "round 4 is over"),))
    given_up.start()
    with pytest.raises(RoundOverError, match="round 4 is over"):
        notices.run_attempt(4, 10, hangs.wait)
    hangs.set()


@pytest.mark.parametrize("silent", [True, False])
def test_collectives_with_a_host_that_answers_no_more_are_ended_at_once(silent: bool) -> None:
    progress = TrainingProgress()
    notices = RoundNotices(progress)
    progress.enter(1, 0, 2)
    notices.group = SimpleNamespace(half=None, connections=GroupConnections())  # type: ignore[assignment]
    notices.on_notice(Notice(1, None, "host b was lost", silent))
    until_the_end = notices.check()
    assert until_the_end is not None
    assert (until_the_end <= SILENT_GRACE_S) == silent


def test_who_waits_for_its_device_to_be_cut_off_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, device = TrainingProgress(), SimpleNamespace(abort=threading.Event().wait)
    notices = RoundNotices(progress)
    progress.enter(1, 0, 2)
    half = DeviceHalf(device)  # type: ignore[arg-type]
    notices.group = SimpleNamespace(half=half, connections=GroupConnections())  # type: ignore[assignment]
    monkeypatch.setattr(notices._thread, "count_asleep", lambda: HOPELESS_CHECKS)
    monkeypatch.setattr(notices, "_grace", 0.0)
    monkeypatch.setattr(notices, "end_process", lambda problem: problem)
    notices._broken_since = 0.0
    half.cut_off("a.0.1 was killed")
    assert notices.check() == CHECK_S
    half._deadline = 0.0
    assert "was not ended within" in str(notices.check())
