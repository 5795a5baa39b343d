"""What lies in `deploy/` for Prometheus and Grafana is valid, and names what exists."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest

from tests.support.dashboards import DASHBOARD, DEPLOY, metrics_in, of_alerts, of_dashboard


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "alerts.yaml"),
        ("test", "rules", "alerts_test.yaml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(words: tuple[str, ...]) -> None:
    argv, folder = ["promtool", *words], DEPLOY / "prometheus"
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_dashboard_and_alerts_name_metrics() -> None:
    assert {"elastic_world_size", "elastic_step_duration_seconds"} <= metrics_in(of_dashboard())
    assert {"elastic_step", "elastic_recovery_duration_seconds"} <= metrics_in(of_alerts())


def test_no_two_panels_of_the_dashboard_share_a_place_or_a_number() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations((panel["gridPos"] for panel in panels), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in panels) == 24
