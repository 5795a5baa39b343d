"""A job whose journal is in etcd, on one machine: its driver is killed, or stopped for long."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_driver.runtime.journal.etcd import EtcdClient
from elastic_driver.runtime.journal.tenure import RunKeys
from tests.e2e.test_resume import TRAIN, newest_step, say, steps_beyond
from tests.support.etcd import EtcdCluster, why_not
from tests.support.job import assert_no_step_lost_or_repeated, elasticrun
from tests.support.ports import free_ports

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def test_the_same_command_goes_on_with_a_killed_driver_s_job_from_etcd(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, free_ports(6)) as etcd:
        args = ("-H", "localhost:2", "-np", "2", "--journal", etcd.url, "--", TRAIN)
        with elasticrun(*args, env={"STEPS": "900"}) as job:
            pids = set(job.until_size(2))
            status, line = say(job, "--standby", "--journal", etcd.url)
            assert status == 64
            assert "a standby needs a --state-dir that no other driver" in line
            job.kill_driver()
            etcd.kill(0)
            job.start(*args)  # it waits until the lease of the first driver is over
            job.until(lambda: job.events("driver_resumed"), "the next driver")
            step = newest_step(job)
            job.until(lambda: steps_beyond(job, step + 20), "steps with the next driver")
            assert set(job.live()) == pids
            assert job.wait(120) == 0, job.describe()
            assert_no_step_lost_or_repeated(job, 900)
            keys = RunKeys(job.run_id)
            with EtcdClient(etcd.access) as client:
                left = [each.key.decode() for each in client.range(keys.prefix, keys.prefix + "~")]
            assert left == [keys.about, keys.end, keys.term(1), keys.term(2)]
            status, line = say(job, "--resume", "--journal", etcd.url, "--", TRAIN)
            assert status == 0
            assert f"run {job.run_id} is over since" in line
            job.assert_nothing_left()


def test_a_driver_that_was_stopped_while_another_took_over_ends_and_harms_nobody(
    tmp_path: Path,
) -> None:
    with EtcdCluster(tmp_path, free_ports(6)) as etcd:
        args = ("-H", "localhost:2", "-np", "2", "--journal", etcd.url, "--", TRAIN)
        with elasticrun(*args, env={"STEPS": "900"}) as job:
            pids = set(job.until_size(2))
            former, folder = job.process, job.state_dir
            former.send_signal(signal.SIGSTOP)
            job.state_dir = job.folder / "elsewhere"
            job.start("--standby", "--journal", etcd.url)
            job.until(lambda: job.events("driver_resumed"), "a standby takes over")
            former.send_signal(signal.SIGCONT)
            assert former.wait(30) == 75
            assert "goes on with this run; driver 1 ends" in job.stderr
            assert (folder / job.run_id / "journal.db").exists()
            assert job.wait(120) == 0, job.describe()
            assert {record.pid for record in job.steps()} == pids
            assert_no_step_lost_or_repeated(job, 900)
            job.assert_nothing_left()
