"""Signals become requests to the driver, and nothing is left behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from elastic_driver.core.driver_events import JobLeaving
from elastic_driver.runtime.driver import ElasticDriver
from launcher.launch.signals import announce_end, stop_on_signals
from tests.support.job import elasticrun


class Asked:
    """Takes the place of a driver that is asked to stop."""

    def __init__(self, *, takes: bool = True) -> None:
        self.requests: list[tuple[str, int]] = []
        self.takes = takes

    def request_stop(self, reason: str, exit_code: int) -> None:
        self.requests.append((reason, exit_code))

    def post(self, event: JobLeaving) -> bool:
        if self.takes:
            self.requests.append((event.reason, int(event.deadline)))
        return self.takes


@contextlib.contextmanager
def handling(driver: Asked, notice: float = 0.0) -> Iterator[None]:
    with stop_on_signals(cast("ElasticDriver", driver), notice=notice):
        yield


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 143)],
)
def test_a_signal_asks_for_the_end_with_its_status(number: signal.Signals, code: int) -> None:
    driver = Asked()
    before = signal.getsignal(number)
    with handling(driver):
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert [exit_code for _, exit_code in driver.requests] == [code, code]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_gives_the_job_the_grace_period(number: signal.Signals) -> None:
    driver = Asked()
    with handling(driver, notice=40.0):
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    told = f"told by {number.name} that its time is over"
    assert driver.requests == [(told, 40), ("told to stop by SIGTERM", 143)]


@pytest.mark.parametrize(
    ("notice", "takes", "asked"), [(30, True, 30), (0, True, 143), (30, False, 143)]
)
def test_the_end_of_an_allocation_is_a_notice_if_there_is_time_and_the_driver_takes_it(
    notice: float, takes: bool, asked: int
) -> None:
    driver = Asked(takes=takes)
    announce_end(cast("ElasticDriver", driver), "Slurm job 1 is over", notice)
    assert driver.requests == [("Slurm job 1 is over", asked)]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    driver = Asked()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with handling(driver):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert driver.requests == []


def test_a_second_interrupt_does_not_wait_for_a_stubborn_worker(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with elasticrun("-np", "1", "--stop-grace", "500", str(script)) as job:
        job.until(lambda: "up" in job.stdout, "the worker ignores SIGTERM")
        job.process.send_signal(signal.SIGINT)
        # Of another kind, for two equal signals that come together are one to the kernel.
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 130
        job.assert_nothing_left()
