"""Which of a rank's measured steps its heartbeat tells, so that the driver can compare ranks.

Steps may be a millisecond long, beats are seconds apart and their messages small: of short steps
only every 2ⁿth is told. All ranks keep the same ones, as n follows from the step time they share
(and where it differs, every second kept step of the one is one of the other's). The last few are
told again with each beat, so that no message has to arrive.

The training thread notes, the heartbeat thread collects: a deque's `append` and `popleft` are
atomic, so no lock is needed. Times are seconds.
"""

from __future__ import annotations

from collections import deque

from elastic_driver.core.messages import MAX_SAMPLES, Sample

COVERED_S = 6.0  # what the samples of one message reach back: three beats, or as many looks
LARGEST_BACKLOG = 4096  # steps between two beats


class StepSamples:
    """The measured steps of this process in the round it is in."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, Sample]] = deque(maxlen=LARGEST_BACKLOG)
        self._kept: deque[Sample] = deque(maxlen=MAX_SAMPLES)  # the heartbeat thread's own
        self._round = 0  # likewise

    def note(self, round_id: int, step: int, seconds: float) -> None:
        """A committed step of this round took this rank so long; for the training thread."""
        self._noted.append((round_id, (step, seconds)))

    def collect(self, round_id: int, step_time: float) -> tuple[Sample, ...]:
        """The samples of this round to tell, oldest first; for the heartbeat thread.

        `step_time`: what a step takes, waiting included.
        """
        if round_id != self._round:
            self._round = round_id
            self._kept.clear()
        every = stride(step_time)
        while self._noted:
            noted_in, (step, seconds) = self._noted.popleft()
            if noted_in == round_id and step % every == 0:
                self._kept.append((step, round(seconds, 6)))
        return tuple(self._kept)


def stride(step_time: float) -> int:
    """Of how many steps one is told: the smallest power of two with which a message reaches back
    far enough."""
    every = 1
    while every * MAX_SAMPLES * step_time < COVERED_S and every < LARGEST_BACKLOG:
        every *= 2
    return every
