"""How long something takes on this node, whatever else goes on there for a moment.

The best of several stretches counts. A stretch is long enough for what makes a node slow for
good to show in it: a processor quota lets a process run at full speed and then stops it for the
rest of a period, usually 0.1 s, so the fastest single call would be a healthy node's. It is short
enough that what passes (another program's second, a page cache) spoils one stretch and not all of
them; for the same reason there is some time between two of them. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from elastic_driver.worker.nodecheck import cpu_contention

WARM_UP_S = 0.1  # loads libraries, and uses up what a quota has saved for an idle process
STRETCH_S = 0.3  # several periods of a quota
STRETCHES = 3
PATIENCE = 2.0  # times as long as all stretches should take, and no further one is begun
PAUSE_S = 0.05  # between two of them: who shares the machine takes its turn
TOGETHER_S = 2.5  # for all calls that are timed together with others: slow ones, or a busy machine
TOGETHER_CALLS = (3, 80)  # at least, for slow links, and at most
_LEAST_SHARE = 0.01  # of a stretch that counts, whatever is excused

CLOSE = 1.1  # times another is as long; then they agree

Work = Callable[[], object]
Stretch = Callable[[float], float]  # at least so many seconds of something → seconds a call took


class Group(Protocol):
    """Those who do something together; every one makes the same calls in the same order."""

    def longest(self, times: Sequence[float]) -> list[float]:
        """The longest of everybody's times, place by place."""
        ...

    def sums(self, times: Sequence[float]) -> list[float]:
        """The sums of everybody's times, place by place."""
        ...


def repeated(
    work: Work, settle: Work = lambda: None, excuse: cpu_contention.Excuse = cpu_contention.none
) -> Stretch:
    """A stretch of calls one after the other.

    `settle` waits until what a call has begun is done; what `excuse` says was lost does not count.
    """

    def stretch(least: float) -> float:
        settle()
        account = excuse()
        began, calls = time.perf_counter(), 0
        while True:
            work()
            settle()
            calls += 1
            passed = time.perf_counter() - began
            if passed >= least:
                return max(passed - account().lost, passed * _LEAST_SHARE) / calls

    return stretch


def in_threads(
    works: Sequence[Work], excuse: cpu_contention.Excuse = cpu_contention.none
) -> Stretch:
    """A stretch in which each of `works` is called in a thread of its own, all independent.

    What a thread loses to another program is lost by that thread alone: none waits for it, as
    those of one product would. The result is seconds a call, of all threads together.
    """

    def stretch(least: float) -> float:
        rates = [0.0] * len(works)

        def run(index: int) -> None:
            rates[index] = 1 / repeated(works[index], excuse=excuse)(least)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not all(rates):
            raise RuntimeError("a measuring thread failed; what it raised is above")
        return 1 / sum(rates)

    return stretch


def best_of(
    measured: Sequence[Stretch],
    turn: Callable[[], AbstractContextManager[None]],
    *,
    stretch: float = STRETCH_S,
    stretches: int = STRETCHES,
) -> list[float]:
    """Seconds a call, for each of `measured` in its best stretch; `turn` is held during each.

    Where stretches agree, or single calls take far longer than one should, no further one is made.
    """
    times: list[list[float]] = [[] for _ in measured]
    left = PATIENCE * stretch * stretches * len(measured)
    for number in range(stretches):
        if number and (left <= 0 or all(map(_agree, times))):
            break
        if number:
            time.sleep(PAUSE_S)
        with turn():
            began = time.perf_counter()
            for measure, own in zip(measured, times, strict=True):
                measure(min(WARM_UP_S, stretch))
                own.append(measure(stretch))
            left -= time.perf_counter() - began
    return [min(own) for own in times]


def _agree(times: Sequence[float]) -> bool:
    """Whether the two best times are close: nothing has disturbed them."""
    best, *others = sorted(times)
    return bool(others) and others[0] <= CLOSE * best


def together(
    work: Work,
    settle: Work,
    group: Group,
    excuse: cpu_contention.Excuse = cpu_contention.none,
    *,
    seconds: float = TOGETHER_S,
) -> float:
    """Seconds for the best of some calls that others make too; the same number for all of them.

    All begin each call together, and it is as long as the longest of them takes: a sender is
    done once the kernel has taken its data, long before a narrow link has carried them. A single
    call is enough to be timed, as an exchange moves more than a shaped link lets through at once.
    What any of the group has lost to other programs in a call has delayed all, and does not count;
    the time for which they were at work always does.
    """
    work()
    settle()
    (once,) = group.longest([repeated(work, settle)(0.0)])
    least, most = TOGETHER_CALLS
    spans, lost, used = [], [], []
    for _ in range(max(least, min(most, int(seconds / max(once, 1e-6))))):
        group.longest([0.0])
        account = excuse()
        began = time.perf_counter()
        work()
        settle()
        spans.append(time.perf_counter() - began)
        told = account()
        lost.append(told.lost)
        used.append(told.used)
    calls = zip(group.longest(spans), group.sums(lost), group.longest(used), strict=True)
    return min(
        max(span - excused, min(span, busy), span * _LEAST_SHARE) for span, excused, busy in calls
    )
