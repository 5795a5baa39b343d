"""What the tests of the local backend share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.processes import children
from tests.launcher.agent.harness import eventually
from tests.launcher.backends.machine import Machine
from tests.support.processes import is_running


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    before = frozenset(children())
    machine = Machine(tmp_path)
    yield machine
    machine.backend.close(0)
    machine.close()
    eventually(lambda: not [pid for pid in children() if pid not in before and is_running(pid)])
