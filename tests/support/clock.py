"""A wall clock that can be told to jump, for processes that a test starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("jumping_clock.c")


def jumping_clock(folder: Path, seconds_file: str) -> dict[str, str]:
    """The variables of such a process; the seconds to add stand in `seconds_file`."""
    library = folder / "clock.so"
    compiler = ["cc", "-shared", "-fPIC", "-O", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(compiler, check=True)
    return {"LD_PRELOAD": str(library), "JUMPING_CLOCK": seconds_file}
