"""Groups of this host and across hosts in a world of one; tests/e2e has two hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic_driver as elastic
from elastic_driver.errors import UsageError

ALONE = """
import torch, torch.distributed as dist
import elastic_driver as elastic
from elastic_driver.errors import UsageError

elastic.init()
total = torch.ones(1)
for group in (elastic.local_group(), elastic.cross_group()):
    dist.all_reduce(total, group=group)
    assert dist.get_process_group_ranks(group) == [0]
assert elastic.local_group() is elastic.local_group() is not elastic.cross_group()
elastic.shutdown()
try:
    elastic.local_group()
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize("ask", [elastic.local_group, elastic.cross_group])
def test_there_is_no_group_before_a_world(ask: object) -> None:
    with pytest.raises(UsageError, match=r"call elastic\.init\(\) first"):
        ask()  # type: ignore[operator]


def test_a_process_alone_has_groups_of_one_until_its_world_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "before this process joined a world" in done.stdout
