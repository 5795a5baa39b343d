"""The default backend asks for ssh only where a host is another machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import BackendJob
from launcher.backends.auto import AutoBackend
from tests.support.job import JOBS, elasticrun


@pytest.fixture
def without_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A PATH on which there is a shell, and no ssh."""
    for name in ("sh", "cat", "env"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    return str(tmp_path)


@pytest.mark.usefixtures("without_ssh")
def test_ssh_is_asked_for_where_a_host_is_another_machine() -> None:
    backend = AutoBackend(BackendJob())
    backend.check(())
    backend.check((("localhost", 2), ("127.0.0.2", 1)))
    with pytest.raises(UsageError, match="ssh was not found, which starts agents on other hosts"):
        backend.check((("localhost", 2), ("gpu7.example", 1)))


def test_a_job_whose_discovery_names_this_machine_alone_needs_no_ssh(
    tmp_path: Path, without_ssh: str
) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    argv = ("-np", "2", "--host-discovery-script", str(script), sys.executable)
    with elasticrun(*argv, str(JOBS / "plain.py"), env={"PATH": without_ssh}) as job:
        assert job.wait() == 0, job.describe()


def test_a_host_that_needs_ssh_where_there_is_none_is_told_with_the_cause(
    tmp_path: Path, without_ssh: str
) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho 198.51.100.7:2\n")
    script.chmod(0o755)
    argv = ("-np", "2", "--host-discovery-script", str(script), "--start-timeout", "5")
    argv = (*argv, sys.executable, str(JOBS / "plain.py"))
    with elasticrun(*argv, env={"PATH": without_ssh}) as job:
        assert job.wait() == 75, job.describe()
        assert "cannot run ssh to reach 198.51.100.7: No such file" in job.stderr
