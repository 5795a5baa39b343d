"""Signals to `elasticrun`: they end a job in good order, or what comes before it.

Batch systems and service managers send SIGTERM, SIGUSR1 or SIGUSR2, often to every process of a job
and more than once: the job leaves at a step boundary, and later ones of these signals are about the
same leaving. Ctrl-C (SIGINT) and a closed terminal (SIGHUP) stop the job without that. Only SIGINT
says "at once", when the job is being stopped already: a person sends it.
"""

import contextlib
import signal
from collections.abc import Iterator

from elastic_driver.errors import ClusterError, ExitCode
from elastic_driver.job.events import JobLeaving
from elastic_driver.runtime.driver import ElasticDriver
from launcher.edge import TO_LEAVE, handled

_SIGNALS = {
    signal.SIGINT: ("interrupted by Ctrl-C", ExitCode.INTERRUPTED),
    signal.SIGTERM: ("told to stop by SIGTERM", ExitCode.TERMINATED),
    signal.SIGUSR1: ("told by SIGUSR1 that its time is over", ExitCode.TERMINATED),
    signal.SIGUSR2: ("told by SIGUSR2 that its time is over", ExitCode.TERMINATED),
    signal.SIGHUP: ("its terminal was closed (SIGHUP)", ExitCode.TERMINATED),
}


def announce_end(driver: ElasticDriver, reason: str, notice: float) -> None:
    """Let the job leave at a step boundary, within `notice` seconds; stop it at once if that is 0.

    Any thread may call it, and more than once. A driver that takes no notice (any more) stops at
    once, too.
    """
    if driver.stop_asked:
        return
    if not notice or not driver.post(JobLeaving(reason, notice)):
        driver.request_stop(reason, int(ExitCode.TERMINATED))


@contextlib.contextmanager
def stop_on_signals(driver: ElasticDriver, *, notice: float) -> Iterator[None]:
    """Let signals end the job, and not this process, while the context is open.

    A signal of a batch system or a service manager gives the job `notice` seconds to leave; if that
    is 0, the job stops at once. It counts once.
    """
    told = False

    def ask(number: int) -> None:
        nonlocal told
        reason, exit_code = _SIGNALS[signal.Signals(number)]
        if number in TO_LEAVE:
            if not told:
                announce_end(driver, reason, notice)
            told = True
        elif number == signal.SIGINT or not driver.stop_asked:
            driver.request_stop(reason, int(exit_code))

    with handled(_SIGNALS, ask):
        yield


@contextlib.contextmanager
def ended_by_signals(what: str) -> Iterator[None]:
    """Let the first signal end something by an error; later signals change nothing."""
    stopped = False

    def stop(number: int) -> None:
        nonlocal stopped
        if stopped:
            return
        stopped = True
        name = signal.Signals(number).name
        error = ClusterError(f"{what} was stopped by {name}; nothing was started")
        interrupted = number == signal.SIGINT
        error.exit_code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
        raise error

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop):
        yield
