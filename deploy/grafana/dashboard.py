"""Prints the dashboard for Grafana: `python -m deploy.grafana.dashboard > deploy/helm/specdec/files/dashboard.json`."""

from __future__ import annotations

import json
from typing import Any

from deploy.grafana.panel import Panel
from deploy.grafana.panels import ROWS

WIDTH, HEIGHT, ACROSS = 8, 8, 3
"""Size of a panel in Grafana's grid of 24 columns, and number of panels in a row."""

SOURCE = {"type": "prometheus", "uid": "${source}"}

VARIABLES = [
    {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "job",
        "label": "Scrape jobs",
        "type": "query",
        "datasource": SOURCE,
        "query": 'label_values({__name__=~"specdec_(.*_serving|openai_requests_running)"}, job)',
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    },
]


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(row):
            down, right = divmod(index, ACROSS)
            panels.append(shown(panel, {"x": WIDTH * right, "y": y + HEIGHT * down, "w": WIDTH, "h": HEIGHT}))
        y += HEIGHT * -(-len(row) // ACROSS)
    return {
        "uid": "specdec",
        "title": "specdec",
        "description": "Speculative decoding: orchestrators, verifiers, drafts.",
        "tags": ["specdec"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": VARIABLES},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def shown(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    """Return a panel at a place of the grid."""
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.curves.items())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
