"""A run whose journal is in etcd, before anything is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_driver.runtime.run_dir import RunDir
from launcher.launch.etcd_run import EtcdRun


@pytest.mark.parametrize("environ", [{}, {"ELASTIC_ETCD_INSECURE": "1"}])
def test_plain_etcd_on_this_machine_comes_with_one_line(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    options: Any = SimpleNamespace(journal="etcd://127.0.0.1:1,localhost:4", driver_lease=5.0)
    said: list[str] = []
    EtcdRun(options, environ, RunDir(tmp_path, "run"), said.append).__exit__(None, None, None)
    warned = [
        line.partition(":1,localhost:4 is asked without TLS: other users")[1] for line in said
    ]
    assert [bool(each) for each in warned] == [True][len(environ) :]
    assert [len(line.splitlines()) for line in said] == [1][len(environ) :]
