from __future__ import annotations

import signal

from launcher.submit.signals import handled


def test_signals_are_ours_for_a_while_but_for_those_that_are_ignored() -> None:
    heard: list[int] = []
    first, second = signal.SIGUSR1, signal.SIGUSR2
    before = signal.getsignal(first), signal.signal(second, signal.SIG_IGN)
    try:
        with handled((first, second), heard.append):
            signal.raise_signal(first)
            signal.raise_signal(second)
        assert heard == [first]
        assert signal.getsignal(first) == before[0]
        assert signal.getsignal(second) is signal.SIG_IGN
    finally:
        signal.signal(second, before[1])
