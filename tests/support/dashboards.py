"""The expressions of the dashboard and of the alert rules in `deploy/`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "elastic-driver.json").read_text())
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"


def of_dashboard() -> list[str]:
    """Every expression of the dashboard, with what Grafana fills in."""
    panels = [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])
    ]
    notes = [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    return [
        re.sub(r"\$__(rate_)?interval", "1m", each).replace("$instance", ".*")
        for each in (*panels, *notes)
    ]


def of_alerts() -> list[str]:
    """Every expression of the alert rules."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def metrics_in(expressions: Iterable[str]) -> set[str]:
    """The metrics that expressions name, a histogram by the name of the whole."""
    names = {name for each in expressions for name in re.findall(r"\belastic_\w+", each)}
    return {re.sub(r"(_duration_seconds)_(bucket|sum|count)$", r"\1", name) for name in names}
