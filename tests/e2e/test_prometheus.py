"""A real Prometheus reads a job's metrics, configured as docs/operations.md says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from rendezvous.auth import read_token_file
from tests.support.dashboards import ALERTS, metrics_in, of_alerts, of_dashboard
from tests.support.job import JOBS, RunningJob, elasticrun, eventually
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)

CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{alerts}]
scrape_configs:
  - job_name: elastic
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
    scheme: https
    tls_config: {{ca_file: {certificate}, server_name: elastic-driver}}
"""


@contextmanager
def prometheus(folder: Path, job: RunningJob, token: str) -> Iterator[str]:
    """Start Prometheus on a free port of this machine; its address."""
    folder.mkdir()
    target, certificate = driver_of(job), job.run_dir / "tls-cert.pem"
    (folder / "token").write_text(token)
    config, log, address = folder / "config.yml", folder / "log", f"127.0.0.1:{free_port()}"
    names = {"token": folder / "token", "alerts": ALERTS, "certificate": certificate}
    config.write_text(CONFIG.format(target=target, **names))
    argv = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address={address}",
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(argv, stdout=output, stderr=output, cwd=folder)
    try:
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(20)


def ask(address: str, path: str, **query: str) -> Any:
    """Ask Prometheus; None while it does not listen yet."""
    try:
        answer = requests.get(f"{address}/api/v1/{path}", params=query, timeout=10)
        return answer.json()["data"]
    except OSError:
        return None


def value(address: str, metric: str) -> float | None:
    """The newest value of a metric that has one series."""
    found = (ask(address, "query", query=metric) or {"result": []})["result"]
    return float(found[0]["value"][1]) if found else None


def target_error(address: str) -> str | None:
    """What Prometheus says is wrong with its target; empty if nothing, None before it has asked."""
    found = (ask(address, "targets") or {"activeTargets": []})["activeTargets"]
    return found[0]["lastError"] if found and found[0]["health"] != "unknown" else None


def driver_of(job: RunningJob) -> str:
    """HOST:PORT of the job's driver."""

    def look() -> str | None:
        file = job.run_dir / "endpoint.json"
        return json.loads(file.read_text())["url"] if file.exists() else None

    return urllib.parse.urlsplit(job.until(look, "the driver listens")).netloc


def reader_of(job: RunningJob) -> str:
    """The token of a reader, once it is written."""
    driver_of(job)
    return read_token_file(job.run_dir / "token-reader")


def assert_dashboard_and_alerts_find_their_metrics(job: RunningJob, address: str) -> None:
    """Every metric that they name is in a scrape, and Prometheus takes every expression."""
    named = metrics_in((*of_dashboard(), *of_alerts()))
    url, token = f"http://{driver_of(job)}/metrics", reader_of(job)

    def missing() -> set[str]:
        headers = {"Authorization": f"Bearer {token}"}
        scraped = requests.get(url, headers=headers, timeout=10).text
        return named - set(re.findall(r"^# TYPE (\w+)", scraped, re.MULTILINE))

    job.until(lambda: not missing(), "every metric is there")
    for expression in of_dashboard():
        answer = requests.get(f"{address}/api/v1/query", {"query": expression}, timeout=10)
        assert answer.json()["status"] == "success", (expression, answer.text)

    def health() -> list[str]:
        groups = (ask(address, "rules") or {"groups": []})["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    job.until(lambda: health() == ["ok"] * len(of_alerts()), "every alert rule was evaluated")


def test_the_histograms_have_what_has_happened(tmp_path: Path) -> None:
    environ = {"STEPS": "1000000", "STEP_MS": "20"}
    with (
        elasticrun("-np", "2", "--", str(JOBS / "train.py"), env=environ) as job,
        prometheus(tmp_path / "server", job, reader_of(job)) as address,
    ):
        victim = next(iter(job.until_size(2)))
        job.kill(victim)
        job.until_size(2)
        of_steps = "elastic_step_duration_seconds"
        job.until(lambda: (value(address, f"{of_steps}_count") or 0) > 20, "steps have their times")
        mean = job.until(lambda: value(address, f"{of_steps}_sum / {of_steps}_count"), "and a mean")
        assert mean >= 0.02
        recovered = job.until(
            lambda: value(address, "elastic_recovery_duration_seconds_sum"),
            "the recovery has a time",
        )
        assert recovered < time.time() - job.killed[victim]
        rounds = "elastic_round_duration_seconds_count"
        job.until(lambda: (value(address, rounds) or 0) >= 2, "rounds have their times")
        batches = 'elastic_request_duration_seconds_count{route="%s"}'
        for route in ("kv:batch", "waits", "events", "metrics"):  # of an earlier scrape
            job.until(partial(value, address, batches % route), f"{route} has its times")
        assert_dashboard_and_alerts_find_their_metrics(job, address)


def test_prometheus_reads_the_figures_with_the_jobs_token_alone(tmp_path: Path) -> None:
    with elasticrun("-np", "2", "--", "sleep", "1000") as job:
        with prometheus(tmp_path / "right", job, reader_of(job)) as address:
            eventually(
                lambda: (
                    value(address, "elastic_job_info") == 1
                    and value(address, 'elastic_workers{state="running"}') is not None
                ),
                within=30,
                what="Prometheus has read the job's figures",
                context=lambda: f"{target_error(address)}\n{job.describe()}",
            )
            job.until(lambda: target_error(address) == "", "a scrape without an error")
            wanted = "elastic_world_size_wanted"
            job.until(lambda: value(address, wanted) == 2, "the figures of the job")
        with prometheus(tmp_path / "wrong-token", job, "not-the-token") as address:
            error = eventually(lambda: target_error(address), within=30, what="it is refused")
            assert "401" in error
            assert value(address, "elastic_job_info") is None
