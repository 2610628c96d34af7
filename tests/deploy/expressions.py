"""Alerts and panels in `deploy/`, and the metrics in their expressions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = DEPLOY / "helm" / "specdec" / "files" / "alerts.yaml"
DASHBOARD = RULES.with_name("dashboard.json")

NO_METRIC = r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|\b(?:by|on|without|ignoring|group_left) *\([^)]*\)"
"""Parts of an expression without metric names: label matchers, ranges, strings, lists of labels."""

WORDS = {"and", "or", "unless", "offset", "bool"}


@dataclass(frozen=True)
class Alert:
    """An alert rule."""

    name: str
    expression: str
    severity: str
    annotations: dict[str, str]

    @property
    def operands(self) -> list[str]:
        """The expressions compared by the rule: they have values whether or not the rule fires."""
        parts = re.split(r"\sunless\s|^ *and on \([^)]*\) *$", self.expression, flags=re.MULTILINE)
        return [re.sub(r"(==|>=|>|<) *([\d.]+|on \()", r"\1 bool \2", part) for part in parts]


def alerts() -> list[Alert]:
    """Return all alerts."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [
        Alert(rule["alert"], rule["expr"], rule["labels"]["severity"], rule["annotations"])
        for group in groups
        for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, without its rows."""
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def curves() -> list[str]:
    """Return the expressions of all panels."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def metrics(expression: str) -> set[str]:
    """Return the metrics named in an expression."""
    bare = re.sub(NO_METRIC, " ", expression)
    return set(re.findall(r"(?<![\w.])[a-z_]\w*\b(?! *\()", bare)) - WORDS
