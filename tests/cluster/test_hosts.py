"""Hosts are lost in every way a host can be lost; the others go on, and lost ones come back.

Real sshds, agents and gloo groups on four hosts. Bounds: after a loss that the host's kernel tells
of the others train on within `KILLED_S`, after a silent one within `SILENT_S`; `SLACK_S` is for a
busy test machine.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.cluster import Cluster, Node
from tests.support.cluster_job import HEARTBEAT_S, ClusterJob, elasticrun_on, now
from tests.support.job import eventually
from tests.support.processes import signal_each
from tests.support.shaping import rough

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SLACK_S = 3.0
KILLED_S, SILENT_S = 0.3, 2.5
STOPPED_S = 3.0
FOUR = ("-np", "4", "--min-np", "1", "-H", "node[0-3]:1")
ALL = {"node0", "node1", "node2", "node3"}


def lose(job: ClusterJob, fault: Callable[[], None], host: str) -> tuple[float, float, int]:
    """Break a host; seconds until the driver knew and until all others had trained on, and the
    round that was lost."""
    before = job.newest_round()
    at = now()
    fault()
    job.together(3, above=before)
    known = job.wait_event("agent_lost", host, since=at)["t"] - at
    trained = job.first_step_after(before, ALL - {host}) - at
    print(f"known after {known:.2f} s, trained on after {trained:.2f} s")
    return known, trained, before


def assert_clean_end(job: ClusterJob) -> None:
    """Interrupt the job; it ends as it should, and nothing of it is left on any host."""
    job.signal(signal.SIGINT)
    assert job.wait(90) == 130, job.describe()
    job.until_nothing_is_left()


def kill_processes(node: Node) -> None:
    signal_each(node.processes(), signal.SIGKILL)


def test_a_job_on_four_hosts_trains_to_its_end_and_leaves_nothing(cluster: Cluster) -> None:
    with elasticrun_on(cluster, "-np", "8", "-H", "node[0-3]:2", steps=50) as job:
        assert job.wait(120) == 0, job.describe()
        done = [line for line in job.stdout.splitlines() if "done step=50" in line]
        assert sorted(line[:12] for line in done) == [f"[{n}]<stdout>:" for n in range(8)]
        assert len({line.split("digest=")[1].split()[0] for line in done}) == 1
        job.check_steps(set())
        assert job.left_behind() == {}


def test_all_processes_of_a_host_are_killed(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR, defaults=True) as job:
        job.together(4)
        known, trained, _ = lose(job, lambda: kill_processes(cluster.node("node1")), "node1")
        assert known < KILLED_S + SLACK_S / 2
        assert trained < KILLED_S + SLACK_S / 2
        job.together(4, above=job.newest_round())
        job.check_steps({"node1"})
        assert_clean_end(job)


def test_hosts_lost_in_silence_are_lost_in_time_come_back_and_disturb_nobody(
    cluster: Cluster,
) -> None:
    """One job, four faults: power, cable, one-way loss, and an operating system that hangs."""
    nodes = [cluster.node(name) for name in ("node2", "node3", "node1", "node0")]
    faults = [
        (nodes[0].poweroff, lambda: (nodes[0].heal(), nodes[0].boot())),
        (nodes[1].cut, nodes[1].heal),
        (nodes[2].deafen, nodes[2].heal),
        (nodes[3].freeze, nodes[3].thaw),
    ]
    with elasticrun_on(cluster, *FOUR, defaults=True) as job:
        job.together(4)
        for node, (fault, repair) in zip(nodes, faults, strict=True):
            old = {process.pid for process in node.processes()}
            known, trained, before = lose(job, fault, node.name)
            assert known < SILENT_S + SLACK_S / 2, fault
            assert trained < SILENT_S + SLACK_S / 2, fault
            (lost, *_) = (e for e in job.events("agent_lost")[-1:] if e["host"] == node.name)
            assert "silent" in lost["evidence"]
            assert lost["seconds"] < SILENT_S
            repair()
            job.together(4, above=before + 1)
            eventually(
                lambda node=node, old=old: not old & {p.pid for p in node.processes()},
                within=HEARTBEAT_S + SLACK_S,
                what="the old agent and its workers are gone",
                context=job.describe,
            )
        job.check_steps(ALL)
        assert_clean_end(job)


def test_a_host_that_stays_cut_off_ends_its_workers_by_itself(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR, defaults=True) as job:
        job.together(4)
        node = cluster.node("node0")
        lose(job, node.cut, "node0")
        eventually(
            lambda: not node.processes() and not any("elastic-" in f for f in node.files()),
            within=SILENT_S + SLACK_S,
            what="nothing is left on the host",
            context=lambda: f"{node.processes()} {node.files()} {job.describe()}",
        )


def test_the_job_does_not_depend_on_sshd(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR) as job:
        trained = job.together(4, within=150)
        sessions = cluster.run("node1", "pkill", "-f", "sshd: root")
        assert sessions.returncode == 0
        eventually(
            lambda: "lost the ssh connection to node1" in job.stderr,
            within=10,
            what="it is said",
            context=job.describe,
        )
        step = max(r.step for r in trained)
        job.until(lambda: min(r.step for r in job.steps()[-4:]) > step + 50, "training goes on")
        assert job.newest_round() == trained[0].round
        assert not job.events("agent_lost")
        (suspected,) = job.events("agent_suspected")
        (cleared,) = job.events("agent_cleared")
        assert suspected["evidence"] == cleared["evidence"] == "backend"
        assert_clean_end(job)


def test_half_of_the_hosts_are_cut_off_together_and_end_by_themselves(cluster: Cluster) -> None:
    cut = [cluster.node("node1"), cluster.node("node3")]
    with elasticrun_on(cluster, *FOUR, defaults=True) as job:
        before, at = job.together(4, within=150)[0].round, now()
        for node in cut:
            node.cut()
        job.together(2, above=before)
        trained = job.first_step_after(before, {"node0", "node2"}) - at
        print(f"trained on after {trained:.2f} s")
        assert trained < SILENT_S + SLACK_S / 2
        assert job.newest_round() == before + 1, "one round for both"
        for node in cut:
            eventually(
                lambda node=node: not node.processes(),
                within=SLACK_S,
                what="nothing runs on a host that is cut off",
                context=job.describe,
            )
        job.check_steps({node.name for node in cut})


def test_a_driver_that_is_stopped_for_a_while_takes_no_host_for_lost(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR, defaults=True) as job:
        before = job.together(4, within=150)[0].round
        for _ in range(2):
            job.signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)  # the length of the fault
            job.signal(signal.SIGCONT)
            job.process.send_signal(signal.SIGCONT)  # nsenter, which stops with its child
            goal = max(r.step for r in job.steps()) + 150
            job.until(lambda goal=goal: max(r.step for r in job.steps()) > goal, "it goes on")
        assert job.newest_round() == before
        assert not job.events("agent_lost", "worker_lost")
        assert_clean_end(job)


@pytest.mark.night
def test_links_that_lose_and_delay_packets_cost_no_host(cluster: Cluster) -> None:
    with elasticrun_on(cluster, *FOUR, defaults=True) as job:
        before = job.together(4, within=150)[0].round
        with contextlib.ExitStack() as links:
            for host in sorted(ALL):
                links.enter_context(rough(cluster.node(host), 0.05, 2.0))
            step, at = max(r.step for r in job.steps()), now()
            job.until(
                lambda: now() > at + 20 and max(r.step for r in job.steps()) > step + 20,
                "twenty seconds, and training goes on",
                within=120,
            )
        assert job.newest_round() == before
        assert not job.events("agent_lost", "worker_lost")
        assert_clean_end(job)


def test_a_killed_driver_leaves_nothing_on_any_host_if_no_other_one_is_awaited(
    cluster: Cluster,
) -> None:
    with elasticrun_on(cluster, *FOUR, "--driver-timeout", "0") as job:
        job.together(4)
        job.signal(signal.SIGKILL)
        job.until_nothing_is_left(2 * HEARTBEAT_S + 10)


def test_a_host_that_discovery_drops_leaves_at_a_step_boundary(cluster: Cluster) -> None:
    listing, script = cluster.folder / "hosts", cluster.folder / "discover"
    listing.write_text("".join(f"{host}:1\n" for host in sorted(ALL)))
    script.write_text(f"#!/bin/sh\nexec cat {listing}\n")
    script.chmod(0o755)
    args = ("-np", "4", "--min-np", "1", "--host-discovery-script", str(script))
    with elasticrun_on(cluster, *args, "--discovery-interval", "0.2") as job:
        before = job.together(4, within=150)[0].round
        fresh = cluster.folder / "hosts.new"
        fresh.write_text("".join(f"{host}:1\n" for host in sorted(ALL - {"node1"})))
        fresh.replace(listing)
        job.together(3, above=before)
        eventually(
            lambda: not cluster.node("node1").processes(),
            within=15,
            what="nothing runs on the host that was dropped",
            context=job.describe,
        )
        job.check_steps(set())
        assert not job.events("agent_lost", "worker_lost")
        assert_clean_end(job)


def test_a_host_that_comes_back_is_used_at_once_and_was_in_no_cool_down(cluster: Cluster) -> None:
    """Twice the same host, and away for longer than the first cool-down would have been."""
    node = cluster.node("node2")
    with elasticrun_on(cluster, *FOUR) as job:
        job.together(4)
        for away in (0.5, 6.0):
            _, _, before = lose(job, node.poweroff, node.name)
            gone = now()
            job.until(lambda gone=gone, away=away: now() - gone > away, "it is away for a while")
            back = now()
            node.heal()
            node.boot()
            at = now()  # on a busy machine the driver may know before this process goes on
            used = job.wait_event("host_resurrected", node.name, since=back)["t"] - at
            up = job.wait_event("agent_started", node.name, since=back)["t"] - at
            print(f"used {used:.2f} s after sshd was up, its agent was up after {up:.2f} s")
            assert used < 1.0 + SLACK_S
            job.together(4, above=before + 1)
        assert not job.events("host_blacklisted")
        assert {event["host"] for event in job.events("host_unreachable")} == {node.name}
        job.check_steps(ALL)
        assert_clean_end(job)
