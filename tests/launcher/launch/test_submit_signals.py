"""Signals become requests to the driver, and nothing is left behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from elastic_driver.job.events import JobLeaving
from elastic_driver.runtime.driver import ElasticDriver
from launcher.launch.submit import announce_end, stop_on_signals
from tests.support.job import elasticrun


class Asked:
    """Takes the place of a driver that is asked to stop."""

    def __init__(self, *, takes: bool = True) -> None:
        self.requests: list[tuple[str, int]] = []
        self.takes = takes

    @property
    def stop_asked(self) -> bool:
        return any(code in (130, 143) for _, code in self.requests)

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
    assert [exit_code for _, exit_code in driver.requests] == [code]
    assert signal.getsignal(number) is before


ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@pytest.mark.parametrize("notice", [0.0, 40.0])
@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("then", ALL)
def test_only_a_person_says_at_once(
    first: signal.Signals, then: signal.Signals, notice: float
) -> None:
    driver = Asked()
    with handling(driver, notice):
        signal.raise_signal(first)
        signal.raise_signal(then)
        signal.raise_signal(then)
        asked = len(driver.requests)
        # A closed terminal stops what is leaving in good order; the others are about one leaving.
        assert asked == 1 + (then is signal.SIGHUP and first is not then and notice > 0)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert [code for _, code in driver.requests[asked:]] == [130, 130]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_gives_the_job_the_grace_period(number: signal.Signals) -> None:
    driver = Asked()
    with handling(driver, notice=40.0):
        signal.raise_signal(number)
    [(told, seconds)] = driver.requests
    assert number.name in told
    assert seconds == 40


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


def test_in_a_program_of_a_user_signals_are_the_program_s_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with handling(Asked(), notice=40.0):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_interrupt_does_not_wait_for_a_stubborn_worker(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with elasticrun("-np", "1", "--stop-grace", "500", str(script)) as job:
        job.until(lambda: "up" in job.stdout, "the worker ignores both signals")
        job.process.send_signal(signal.SIGINT)
        job.until(lambda: job.events("job_failed") or "interrupted" in job.stderr, "it was heard")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        job.assert_nothing_left()
