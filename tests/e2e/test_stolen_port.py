"""The port of a driver that has died is another user's now: nobody tells it anything, or obeys."""

from __future__ import annotations

import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic_driver.runtime.run_dir import read_endpoint
from rendezvous.tls import certificate_in, make_certificate
from tests.e2e.test_control import ctl
from tests.e2e.test_driver_loss import newest_steps
from tests.support.etcd import EtcdCluster, why_not
from tests.support.job import JOBS, assert_no_step_lost_or_repeated, elasticrun
from tests.support.ports import free_ports
from tests.support.squatter import squatting

SLOW_START_S = 120.0
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_program_at_the_port_of_a_driver_that_has_died_is_told_nothing(
    with_tls: bool, tmp_path: Path
) -> None:
    context = None
    if with_tls:
        own = certificate_in(tmp_path)
        make_certificate(own)
        context = own.context()
    args = ("-np", "2", "--driver-timeout", "200", "--", str(JOBS / "train.py"))
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        before = job.until_size(2, within=SLOW_START_S)
        endpoint = read_endpoint(job.run_dir)
        assert endpoint is not None
        job.kill_driver()
        with squatting(int(urlsplit(endpoint.url).port or 0), context) as squatter:
            step = max(newest_steps(job))
            job.until_without_driver(
                lambda: len(squatter.heard) > 9 and min(newest_steps(job)) > step + 20,
                "agent and workers look for the driver there, and train on",
            )
            where = "--state-dir", str(job.run_dir.parent), "--run-id", job.run_id
            for asked in ("status", "hosts", "stacks", "stop"):
                said = ctl(asked, *where, code=75)
                assert "where another program listens now) has died; go on with the job" in said
                assert len(said.splitlines()) == 1
            heard = list(squatter.heard)
        assert [each for each in heard if each[:1] not in (b"", b"\x16")] == []
        for word in (b"Bearer", b"HTTP", b"localhost"):
            assert word not in b"".join(heard)
        job.start("--resume")
        job.until(lambda: job.events("driver_resumed"), "the next driver", SLOW_START_S)
        after = job.until_size(2, within=SLOW_START_S)
        assert after.keys() == before.keys(), "nobody was stopped"
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        assert_no_step_lost_or_repeated(job, min(record.step for record in after.values()))


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_standby_takes_over_though_another_program_has_the_port(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, free_ports(6)) as etcd:
        args = ("-H", "localhost:2", "-np", "2", "--journal", etcd.url, "--")
        with elasticrun(*args, str(JOBS / "train.py"), env={"STEPS": "100000"}) as job:
            before = job.until_size(2, within=SLOW_START_S)
            endpoint, former = read_endpoint(job.run_dir), job.process
            assert endpoint is not None
            job.state_dir = job.folder / "elsewhere"
            job.start("--standby", "--journal", etcd.url)
            former.kill()
            former.wait()
            with squatting(int(urlsplit(endpoint.url).port or 0), None) as squatter:
                job.until(lambda: job.events("driver_resumed"), "the standby", SLOW_START_S)
                step = max(newest_steps(job))
                job.until(lambda: min(newest_steps(job)) > step + 20, "steps with the standby")
                heard = b"".join(squatter.heard)
            for word in (b"Bearer", b"HTTP", b"localhost"):
                assert word not in heard
            job.process.send_signal(signal.SIGTERM)
            job.wait()
            assert {record.pid for record in job.steps()} == before.keys(), "nobody was stopped"
            assert_no_step_lost_or_repeated(job, step + 20)
