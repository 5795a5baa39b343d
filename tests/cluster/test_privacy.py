"""What others on the network can read of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capture import captured
from tests.support.cluster import Cluster
from tests.support.cluster_job import elasticrun_on
from tests.support.job import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Requests, keys of the store, orders and documents of the rendezvous.
SAID = (
    *("Authorization", "Bearer", "HTTP/1.1", "/v1/", "elastic-driver", "agent:", "worker:"),
    *("job/world", "job/spec", "job/driver", "agents/", "rounds/", "heartbeats/", "leases/"),
    *("StartWorker", "StopWorker", "WorkerReady", "AgentReady", "train.py"),
)


def test_a_job_over_ssh_shows_neither_secret_nor_order_nor_key(
    cluster: Cluster, tmp_path: Path
) -> None:
    _, switch, port = cluster.node("head").cable()
    hosts = ("-np", "2", "-H", "node[0-1]:1")
    with (
        captured(switch, port, tmp_path / "frames") as frames,
        elasticrun_on(cluster, *hosts, steps=30) as job,
    ):
        job.together(2)
        token, fingerprint = (job.run_dir / "token").read_text().split()
        assert job.wait(90) == 0, job.describe()
        # What would be read is read: the same wire, in clear.
        cluster.run("node0", "bash", "-c", "echo said-in-clear > /dev/tcp/head/22")
        seen = frames.read_bytes
        eventually(lambda: b"said-in-clear" in seen(), within=30, what="it captures all frames")
    found_there = seen()
    assert b"\x16\x03\x03" in found_there  # handshakes of TLS
    assert len(found_there) > 20_000
    found = [word for word in (*SAID, token, fingerprint) if word.encode() in found_there]
    assert not found, f"in clear: {found}"
