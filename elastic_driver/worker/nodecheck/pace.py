"""Times work on this node so that short disturbances do not count and lasting ones do.

The best of several intervals counts. An interval is long enough to show what makes a node slow for
good: a CPU quota lets a process run at full speed and then stops it for the rest of a period,
usually 0.1 s, so the fastest single call would look healthy. It is short enough that a passing
disturbance (another program's second, a page cache) spoils one interval and not all of them; for
the same reason there is a pause between two of them. Times are seconds.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from torch.distributed import ReduceOp

from elastic_driver.worker.cpu_time import CpuAccount, CpuTime

WARM_UP_S = 0.1  # loads libraries, and uses up what a quota has saved for an idle process
INTERVAL_S = 0.3  # several periods of a quota
INTERVALS = 3
PATIENCE = 2.0  # times the expected time of all intervals; after that no further one begins
PAUSE_S = 0.05  # between two intervals: other hosts on the machine get its lock
TOGETHER_S = 2.5  # of all calls that are timed together with other ranks
TOGETHER_CALLS = (3, 80)  # at least, for slow links, and at most
_LEAST_SHARE = 0.01  # of an interval that counts, whatever is subtracted
AGREE_FACTOR = 1.1  # two times agree if one is at most this times the other

Work = Callable[[], object]
Timing = Callable[[float], float]  # runs at least so many seconds; returns the seconds of a call
Lock = Callable[[], AbstractContextManager[None]]
# Combines the times of all ranks, element by element; a collective.
Reduce = Callable[[Sequence[float], object], list[float]]


def repeated(work: Work, settle: Work = lambda: None, account: CpuAccount = CpuTime) -> Timing:
    """Return the timing of calls one after the other.

    `settle` waits for the device after a call; time that `account` calls lost does not count.
    """

    def timing(least: float) -> float:
        settle()
        before = account()
        began, calls = time.perf_counter(), 0
        while True:
            work()
            settle()
            calls += 1
            passed = time.perf_counter() - began
            if passed >= least:
                lost = account().since(before).waited
                return max(passed - lost, passed * _LEAST_SHARE) / calls

    return timing


def in_threads(works: Sequence[Work], account: CpuAccount = CpuTime) -> Timing:
    """Return the timing of independent calls, each of `works` in a thread of its own.

    A thread that loses time to another program holds up no other, as it would in one product of
    all threads. The result is the seconds a call of all threads together.
    """

    def timing(least: float) -> float:
        def rate(work: Work) -> float:
            return 1 / repeated(work, account=account)(least)

        with ThreadPoolExecutor(len(works)) as pool:
            return 1 / sum(pool.map(rate, works))

    return timing


def best_of(
    timings: Sequence[Timing], lock: Lock, interval: float = INTERVAL_S, intervals: int = INTERVALS
) -> list[float]:
    """Return the seconds a call of each timing in its best interval; `lock` is held during each.

    No further interval begins where the best two agree, or single calls take far too long.
    """
    times: list[list[float]] = [[] for _ in timings]
    left = PATIENCE * interval * intervals * len(timings)
    for number in range(intervals):
        agree = number > 1 and all(sorted(own)[1] <= AGREE_FACTOR * min(own) for own in times)
        if agree or (number and left <= 0):
            break
        if number:
            time.sleep(PAUSE_S)
        with lock():
            began = time.perf_counter()
            for timing, own in zip(timings, times, strict=True):
                timing(min(WARM_UP_S, interval))
                own.append(timing(interval))
            left -= time.perf_counter() - began
    return [min(own) for own in times]


def together(work: Work, settle: Work, reduce: Reduce, account: CpuAccount = CpuTime) -> float:
    """Return the seconds of the fastest of several calls; all ranks make the same number of calls.

    All ranks begin each call together, and its time is that of the slowest rank: a sender is done
    once the kernel has taken its data, long before a narrow link has carried them. A single call
    can be timed, because an exchange moves more than a shaped link passes at once. CPU time that
    any rank lost to other programs has delayed all and does not count; CPU time of work does.
    """
    work()
    settle()
    (once,) = reduce([repeated(work, settle)(0.0)], ReduceOp.MAX)
    least, most = TOGETHER_CALLS
    spans, used = [], []
    for _ in range(max(least, min(most, int(TOGETHER_S / max(once, 1e-6))))):
        reduce([0.0], ReduceOp.MAX)
        before, began = account(), time.perf_counter()
        work()
        settle()
        spans.append(time.perf_counter() - began)
        used.append(account().since(before))
    waited = reduce([u.waited for u in used], ReduceOp.SUM)
    ran = reduce([u.ran for u in used], ReduceOp.MAX)
    calls = zip(reduce(spans, ReduceOp.MAX), waited, ran, strict=True)
    return min(max(span - lost, min(span, busy), span * _LEAST_SHARE) for span, lost, busy in calls)
