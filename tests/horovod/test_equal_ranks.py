"""After a change of the world every rank trains the same model, with the same rate."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.horovod.on_ranks import JOBS
from tests.support.job import Hosts, elasticrun

pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank


def steps_in(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What the processes wrote of each step."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                facts = json.loads(line)
                found[facts["step"]].append(facts)
    return found


@pytest.mark.parametrize("rule", ["set", "multiplied"])
@pytest.mark.parametrize("api", ["horovod", "native"])
def test_a_rate_that_a_reset_callback_adapts_is_the_same_on_all_ranks_after_a_host_grows(
    tmp_path: Path, api: str, rule: str
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    options = ["--host-discovery-script", str(hosts.script), "-np", "2", "--max-np", "3"]
    words = [str(JOBS / "rescaled.py"), str(tmp_path), api, rule]
    with elasticrun(*options, "--", *words) as job:
        job.until(lambda: 5 in steps_in(tmp_path), "both train", within=90)
        hosts.set("localhost:3")
        assert job.wait(within=90) == 0, job.describe()
    steps = steps_in(tmp_path)
    sizes = {number: {facts["size"] for facts in found} for number, found in steps.items()}
    assert set().union(*sizes.values()) >= {2, 3}
    for number, found in sorted(steps.items()):
        told = f"step {number}: {found}"
        assert len(sizes[number]) == 1, told
        assert len(found) == found[0]["size"], told
        assert len({facts["rate"] for facts in found}) == 1, told
        assert len({facts["digest"] for facts in found}) == 1, told
    assert steps[max(steps)][0]["rate"] == pytest.approx(0.03)
