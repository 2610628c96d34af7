"""Alerts name served metrics, have a page each in docs/runbooks, and pass their promtool tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from orchestrator.metrics import ERRORS
from tests.deploy.expressions import PROMETHEUS, RULES, Alert, alerts, metrics
from tests.metrics import served_names

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
HEADINGS = ["What it means", "What you see", "How to confirm", "What to do"]
CALLERS = {
    *("INVALID_REQUEST", "PROMPT_TOO_LONG", "UNKNOWN_MODEL", "NOT_BUILT"),
    *("DEADLINE", "PROMPT_CHANGED", "MODEL_CHANGED"),
    *("UNAUTHENTICATED", "WRONG_TENANT", "TENANT_LIMIT", "UNKNOWN_REQUEST", "GRAMMAR_TOO_COMPLEX"),
    *("LEARNING_NOT_PERMITTED", "NOT_REMEMBERED"),
}
"""Error reasons without an alert: caused by callers or a change of the model, or reported to the operator who asked."""

PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: it comes with Prometheus"
)


def scraped_names() -> set[str]:
    """Return the names of all time series in a scrape of a service, including Prometheus' own."""
    of_process = {
        sample.name for each in ProcessCollector(registry=CollectorRegistry()).collect() for sample in each.samples
    }
    return served_names() | of_process | {"up"}


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ('sum by (job) (rate(a_total{reason!~"x|y"}[5m])) / sum(b) > 0.5', {"a_total", "b"}),
        ("(rate(a[5m]) and on (job, instance) b) > 0.9", {"a", "b"}),
        ("a offset 1d == bool 0 or vector(0)", {"a"}),
        ("sum by (le) (a_bucket) / on () group_left () sum(b) unless c", {"a_bucket", "b", "c"}),
        ('time() - a{job=~"$job"}', {"a"}),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression: str, found: set[str]) -> None:
    assert metrics(expression) == found


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_alerts_name_metrics_that_are_served(alert: Alert) -> None:
    named = metrics(alert.expression)
    assert named
    assert named <= scraped_names(), named - scraped_names()


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_says_how_bad_it_is_and_leads_to_its_page(alert: Alert) -> None:
    assert alert.severity in ("critical", "warning", "info")
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert all(alert.annotations[each].endswith(".") for each in ("summary", "description"))
    assert alert.annotations["runbook_url"] == f"docs/runbooks/{alert.name}.md"
    page = (RUNBOOKS / f"{alert.name}.md").read_text()
    assert page.startswith(f"# {alert.name}\n")
    assert re.findall("^## (.*)$", page, re.MULTILINE) == HEADINGS


def test_every_page_is_of_an_alert_and_in_the_index() -> None:
    names = [alert.name for alert in alerts()]
    assert len(set(names)) == len(names)
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == {*names, "README"}
    index = (RUNBOOKS / "README.md").read_text()
    for alert in alerts():
        row = f"| [{alert.name}]({alert.name}.md) | {alert.severity} | {alert.annotations['summary']} |"
        assert row in index


def test_every_reason_of_an_error_has_an_alert_or_is_the_callers() -> None:
    expressions = "\n".join(alert.expression for alert in alerts())
    matchers = re.findall(r'failed_requests_total\{\s*reason=~?"([A-Z_|]+)"', expressions)
    alerted = {reason for matcher in matchers for reason in matcher.split("|")}
    assert not alerted & CALLERS
    assert alerted | CALLERS == ERRORS


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
    fire = {
        name
        for test in tests
        for each in test["promql_expr_test"]
        if each["exp_samples"]
        for name in re.findall('alertname="([A-Za-z]+)"', each["expr"])
    }
    assert fire == {alert.name for alert in alerts()}


@PROMTOOL
@pytest.mark.parametrize(
    "command",
    [("check", "rules", str(RULES)), ("check", "config", "prometheus.yaml"), ("test", "rules", "alerts_test.yaml")],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
