"""How long a membership change takes when the driver's host loses power at the same moment.

Four hosts train, a standby waits on a fifth one, etcd is on a sixth. The driver's host loses power,
and a worker dies. The table says when etcd had deleted the driver's key, when the standby had the
job, when the agents were back, and when the next round was complete.

    python -m tests.cluster.standby_trial [--times 5]
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence

from tests.cluster.test_standby import FOUR, LEASE_S, kill_worker, stand_by
from tests.support.cluster import Cluster, why_not
from tests.support.cluster_job import elasticrun_on, now
from tests.support.etcd import EtcdCluster
from tests.support.etcd import why_not as why_no_etcd
from tests.support.job import eventually

# Waits in the network of the cluster until another driver has the key, or nobody.
WATCH = """
import sys, time
from elastic_driver.runtime.journal.etcd import EtcdClient, read_access
from elastic_driver.runtime.journal.tenure import RunKeys
with EtcdClient(read_access(sys.argv[1], {}, insecure=True)) as client:
    key = RunKeys(sys.argv[2]).driver
    revision = client.range(key)[0].create_revision
    print("watches", flush=True)
    while any(found.create_revision == revision for found in client.range(key)):
        time.sleep(0.01)
    print(time.time(), flush=True)
"""
STAGES = ("key deleted", "standby has the job", "agents back", "next round", "first step")


def one_loss() -> list[float]:
    """The seconds from the loss to each stage."""
    with Cluster(6) as cluster:
        node = cluster.node("node5")
        folder = cluster.folder / "etcd"
        folder.mkdir()
        place = node.address, tuple(node.inside())
        with (
            EtcdCluster(folder, range(2379, 2385), (place,) * 3) as etcd,
            elasticrun_on(cluster, *FOUR, "--journal", etcd.url) as job,
        ):
            job.together(4)
            standby = stand_by(cluster, job, etcd, "node4")
            standby.until_said("waits beside driver 1 (host head, process")
            seen = cluster.folder / "seen"
            argv = [sys.executable, "-c", WATCH, etcd.url, job.run_id]
            cluster.start("node5", argv, out=seen, err=cluster.folder / "errors", env={})
            eventually(lambda: "watches" in seen.read_text(), within=20.0, what="it watches")
            before, at = job.newest_round(), now()
            cluster.node("head").poweroff()
            job.process.wait(10)
            job.process = standby.process
            kill_worker(cluster, "node1")

            def served() -> float | None:
                found = [e["t"] for e in standby.events() if e["event"] == "round_completed"]
                return found[0] if found else None

            done = eventually(served, within=30.0, what="a round", context=lambda: standby.stderr)
            job.together(4, above=before)
            stepped = job.first_step_after(before, {"node0", "node2", "node3"})
            events = standby.events()
            back = [e["t"] for e in events if e["event"] == "agent_returned"]
            if "-v" in sys.argv:
                for event in events:
                    print(f"  {event['t'] - at:7.3f} {event['event']} {event.get('reason')}")
            resumed = standby.resumed()
            assert resumed is not None
            for process in cluster.node("node4").processes():
                if "launcher.cli" in process.cmdline():
                    process.send_signal(signal.SIGINT)
            standby.process.wait(30)
            gone = float(seen.read_text().split()[1])
            return [t - at for t in (gone, resumed, max(back, default=resumed), done, stepped)]


def main(words: Sequence[str] | None = None) -> int:
    """The table; 1 if a change was served late."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("-v", action="store_true", help="show the events, too")
    times = parser.parse_args(words).times
    if reason := why_not() or why_no_etcd():
        print(f"cannot be tried here: {reason}", file=sys.stderr)
        return 75
    found = []
    for _ in range(times):
        found.append(one_loss())
        print("  ".join(f"{each:.2f}" for each in found[-1]), flush=True)
    for stage, seconds in zip(STAGES, zip(*found, strict=True), strict=True):
        print(f"{stage:<20} {statistics.median(seconds):6.2f} s, worst {max(seconds):6.2f} s")
    return int(max(each[3] for each in found) > LEASE_S + 1.0)


if __name__ == "__main__":
    sys.exit(main())
