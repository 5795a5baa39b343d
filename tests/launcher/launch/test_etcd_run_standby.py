"""The options of a journal in etcd and of a standby that make no sense are refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.runtime.journal.etcd import EtcdUnreachableError
from launcher.run_job import run

ETCD = ("--journal", "etcd://127.0.0.1:1")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((*ETCD, "true"), "needs --run-id: the job's name in etcd"),
        (("--journal", "etcd://h:0", "--run-id", "x", "true"), "needs etcd://HOST:PORT"),
        (("--journal", "consul://h", "true"), "is sqlite or etcd://HOST:PORT"),
        ((*ETCD, "--run-id", "x", "--nnodes", "2", "--node-rank", "0", "true"), "with --serve"),
        (("--standby", *ETCD), "needs --run-id ID and --journal etcd://"),
        (("--standby", "--run-id", "x"), "needs --run-id ID and --journal etcd://"),
        (("--standby", "--run-id", "x", *ETCD, "true"), "takes no command"),
        (("--standby", "--run-id", "x", *ETCD, "-np", "2"), "--num-proc cannot be given"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    argv: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=problem):
        run(["--state-dir", str(tmp_path), *argv])


def test_a_job_does_not_begin_without_its_etcd(tmp_path: Path) -> None:
    with pytest.raises(EtcdUnreachableError, match="is a majority of its members running"):
        run(["--state-dir", str(tmp_path), "--run-id", "x", *ETCD, "true"])
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["lock"]  # nobody holds it
