"""The files of a running job are moved by the real logrotate, as in `deploy/`; no line is lost."""

from __future__ import annotations

import getpass
import grp
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.dashboards import DEPLOY
from tests.support.job import elasticrun

PATH = f"{os.environ['PATH']}:/usr/sbin"
pytestmark = pytest.mark.skipif(
    shutil.which("logrotate", path=PATH) is None, reason="logrotate is not installed"
)
PRINT = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done"


def rotate(folder: Path, logs: Path) -> None:
    """Run logrotate with the example, for this folder of logs and this user."""
    user, group = getpass.getuser(), grp.getgrgid(os.getgid()).gr_name
    text = (DEPLOY / "logrotate" / "elastic-driver").read_text()
    config = folder / "rotate.conf"
    config.write_text(
        text.replace("/srv/train/logs", str(logs)).replace("su train train", f"su {user} {group}")
    )
    config.chmod(0o644)
    subprocess.run(
        ["logrotate", "--force", "--state", folder / "state", config],
        check=True,
        env={"PATH": PATH},
        timeout=60,
    )


def test_worker_output_and_event_log_go_on_in_new_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with elasticrun("-np", "1", "--log-dir", str(logs), "sh", "-c", PRINT) as job:
        (file,) = job.until(lambda: [*logs.glob("*/stdout.log")], "the worker has its file", 90)
        job.until(lambda: file.stat().st_size, "the worker prints")
        events = job.run_dir / "events.jsonl"
        before = events.rename(events.with_name("events.jsonl.1"))
        rotate(tmp_path, logs)
        moved = file.with_name("stdout.log.1")
        assert moved.exists()
        job.until(lambda: file.exists() and file.stat().st_size, "the file is made again")
        rotate(tmp_path, logs)
        job.until(lambda: file.exists() and file.stat().st_size, "and again")
        packed = subprocess.run(
            ["gunzip", "-c", f"{moved.with_suffix('.2')}.gz"], capture_output=True, check=True
        )
        job.process.terminate()
        job.wait()
        old = [json.loads(line) for line in before.read_text().splitlines()]
        new = job.events()
        assert new
        assert [e["n"] for e in (*old, *new)] == [*range(1, len(old) + len(new) + 1)]
        lines = packed.stdout.split() + moved.read_bytes().split() + file.read_bytes().split()
        assert list(map(int, lines)) == [*range(1, len(lines) + 1)]
