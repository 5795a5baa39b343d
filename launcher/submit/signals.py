"""Handles signals for a while."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int], None]) -> Iterator[None]:
    """While this lasts, `handler` is called with each of these signals, in the main thread.

    One that is ignored stays so: `nohup elasticrun …` is to survive its terminal.
    """
    ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _frame: handler(got)) for number in ours}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
