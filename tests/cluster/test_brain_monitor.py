"""`elasticbrain monitor --source slurm` with a real Slurm: its nodes come into the database."""

from __future__ import annotations

import sys
import time

import pytest

pytest.importorskip("sqlalchemy")

from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import Node
from tests.support import slurm as real
from tests.support.cluster import Cluster
from tests.support.job import ROOT, eventually
from tests.support.slurm import CPUS, Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_LOOK = """
import sys, time
from elastic_driver.brain.monitoring import MonitorOptions
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.database import Database
from launcher.brain.monitors import Slurm
database = Database(Address(file=sys.argv[1]))
database.put_nodes(Slurm(MonitorOptions()).look(time.time()))
database.close()
"""


def test_nodes_of_slurm_and_what_a_job_takes_of_them() -> None:
    if (reason := real.why_not()) is not None:
        pytest.skip(reason)

    def look(slurm: Slurm) -> dict[str, Node]:
        address = Address(file=str(slurm.folder / "stats.db"))  # each node has a /tmp of its own
        slurm.run("head", f"PYTHONPATH={ROOT}", sys.executable, "-c", _LOOK, address.file)
        database = Database(address)
        try:
            return {node.name: node for node in database.nodes(time.time())}
        finally:
            database.close()

    with Cluster(2) as cluster:
        slurm = Slurm(cluster)
        slurm.start()
        before = look(slurm)
        assert [(n.slots, n.idle) for n in before.values()] == [(CPUS, CPUS)] * 2
        assert sorted(before) == ["node0", "node1"]
        job = (
            "sbatch",
            "--nodelist=node0",
            "--ntasks=1",
            "--cpus-per-task=2",
            "--output=/dev/null",
        )
        slurm.run("head", *job, "--wrap", "sleep 100")
        eventually(lambda: look(slurm)["node0"].idle == CPUS - 2, within=30, what="the job runs")
        assert look(slurm)["node1"].idle == CPUS
        slurm.run("head", "scontrol", "update", "nodename=node1", "state=drain", "reason=test")
        seen = look(slurm)["node1"].seen
        assert look(slurm)["node1"].seen == seen, "a drained node is not seen any more"
