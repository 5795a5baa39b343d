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

from elastic_driver.worker.checks import excuses

WARM_UP_S = 0.1  # loads libraries, and uses up what a quota has saved for an idle process
STRETCH_S = 0.3  # several periods of a quota
STRETCHES = 3
PATIENCE = 2.0  # times as long as all stretches should take, and no further one is begun
PAUSE_S = 0.05  # between two of them: who shares the machine takes its turn
TOGETHER_S = 2.5  # for all calls that are timed together with others: slow ones, or a busy machine
TOGETHER_CALLS = (3, 80)  # at least, for slow links, and at most
_LEAST_SHARE = 0.01  # of a stretch that counts, whatever is excused

Work = Callable[[], object]
Stretch = Callable[[float], float]  # at least so many seconds of something → seconds a call took


def repeated(
    work: Work, settle: Work = lambda: None, excuse: excuses.Excuse = excuses.none
) -> Stretch:
    """A stretch of calls one after the other.

    `settle` waits until what a call has begun is done; what `excuse` says was lost does not count.
    """

    def stretch(least: float) -> float:
        settle()
        lost = excuse()
        began, calls = time.perf_counter(), 0
        while True:
            work()
            settle()
            calls += 1
            passed = time.perf_counter() - began
            if passed >= least:
                return max(passed - lost(), passed * _LEAST_SHARE) / calls

    return stretch


def in_threads(works: Sequence[Work], excuse: excuses.Excuse = excuses.none) -> Stretch:
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

    Where single calls take far longer than a stretch should, fewer stretches are made.
    """
    best = [float("inf")] * len(measured)
    left = PATIENCE * stretch * stretches * len(measured)
    for number in range(stretches):
        if number and left <= 0:
            break
        if number:
            time.sleep(PAUSE_S)
        with turn():
            began = time.perf_counter()
            for index, measure in enumerate(measured):
                measure(min(WARM_UP_S, stretch))
                best[index] = min(best[index], measure(stretch))
            left -= time.perf_counter() - began
    return best


def together(
    work: Work,
    settle: Work,
    agree: Callable[[float], float],
    *,
    seconds: float = TOGETHER_S,
) -> float:
    """Seconds for the best of some calls that others make too; all make the same number of them.

    A single call is enough to be timed: an exchange moves more than a shaped link lets through at
    once. `agree` gives everybody the same number for theirs; it is asked how long a call takes.
    """
    work()
    settle()
    once = max(agree(repeated(work, settle)(0.0)), 1e-6)
    least, most = TOGETHER_CALLS
    timed = repeated(work, settle)
    return min(timed(0.0) for _ in range(max(least, min(most, int(seconds / once)))))
