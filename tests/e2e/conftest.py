"""Fixtures of whole jobs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB that can be filled."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
