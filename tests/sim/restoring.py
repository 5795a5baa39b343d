"""Machines beside a twin that comes back, at random moments, from the snapshot of one of them.

Both get the same events at the same times, and have to decide the same, byte for byte.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from elastic_driver.kernel.machine import Machine

OFTEN = 0.1  # of the events are followed by a way there and back


class Restoring:
    """A machine and its twin."""

    def __init__(self, machine: Machine[Any, Any], seed: object, often: float = OFTEN) -> None:
        self.machine, self.often = machine, often
        self.restored = 0
        self._random = Random(f"restoring {seed}")
        self._twin = self._come_back(machine)

    def handle(self, event: Any, now: float) -> Any:
        """Have both decide; sometimes the twin makes way for one that comes back."""
        decisions, twins = self.machine.handle(event, now), self._twin.handle(event, now)
        assert _bytes(decisions) == _bytes(twins), f"a restored machine decides otherwise: {event}"
        if self._random.random() < self.often:
            self._twin = self._come_back(self._twin)
        return decisions

    def compare(self) -> None:
        """Check that both are in the same state."""
        assert self.machine.snapshot() == self._twin.snapshot()
        assert self.machine.deadline() == self._twin.deadline()

    def _come_back(self, machine: Any) -> Any:
        self.restored += 1
        snapshot = machine.snapshot()
        found = type(machine).restored(snapshot)
        assert found.snapshot() == snapshot, "the snapshot of what comes back is another one"
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)


def _bytes(decisions: Any) -> bytes:
    return msgspec.msgpack.encode(decisions, enc_hook=repr, order="deterministic")
