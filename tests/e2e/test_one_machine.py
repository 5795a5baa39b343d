"""Names of this machine are one host, unless they are kept apart."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.support.job import RunningJob, elasticrun

SAY = """
import os
print("LOCAL", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"])
"""
NAMES = f"localhost:1,{socket.gethostname()}:1,127.0.0.1:1"


def places(job: RunningJob) -> list[str]:
    """Local rank, local size and number of the host, of each worker."""
    return sorted(re.findall(r"LOCAL (\d \d \d)", job.stdout))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("-H", NAMES), ["0 3 0", "1 3 0", "2 3 0"]),
        (("-H", NAMES, "--separate-names"), ["0 1 0", "0 1 1", "0 1 2"]),
        (("-H", "127.0.0.1:1,127.0.0.2:1"), ["0 1 0", "0 1 1"]),
    ],
    ids=["names", "kept apart", "loopback addresses"],
)
def test_names_of_one_machine_share_its_local_ranks(
    tmp_path: Path, options: tuple[str, ...], wanted: list[str]
) -> None:
    script = tmp_path / "say.py"
    script.write_text(SAY)
    with elasticrun(*options, "--", str(script)) as job:
        assert job.wait() == 0, job.describe()
        assert places(job) == wanted
        said = "the same machine as localhost" in job.stderr
        assert said is (wanted[0] == "0 3 0")
        job.assert_nothing_left()
