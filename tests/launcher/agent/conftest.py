from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.agent.harness import Driver


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    try:
        yield driver
    finally:
        driver.close()
