"""The dashboard file equals its module's output, and its metrics are served."""

from __future__ import annotations

import json
import re

import pytest

from deploy.grafana.dashboard import dashboard
from tests.deploy.expressions import DASHBOARD, curves, metrics, panels
from tests.deploy.test_alerts import scraped_names
from tests.metrics import families, name, of_http


def test_the_file_is_what_the_module_prints() -> None:
    """Regenerate: `python -m deploy.grafana.dashboard > deploy/helm/specdec/files/dashboard.json`."""
    assert json.loads(DASHBOARD.read_text()) == dashboard()


@pytest.mark.parametrize("expression", curves())
def test_panels_show_metrics_that_are_served(expression: str) -> None:
    named = metrics(expression)
    assert named
    assert named <= scraped_names(), named - scraped_names()


@pytest.mark.parametrize("role", ["verifier", "draft", "orchestrator", "openai"])
def test_the_jobs_to_choose_from_are_those_of_every_role(role: str) -> None:
    (job,) = [variable for variable in dashboard()["templating"]["list"] if variable["name"] == "job"]
    (pattern,) = re.findall(r'__name__=~"(.*?)"', job["query"])
    assert any(re.fullmatch(pattern, name) for name in scraped_names() if name.startswith(f"specdec_{role}_"))


def test_other_scrape_jobs_are_left_out() -> None:
    """Every job of a Prometheus has the metric `up`, and the variable's value for "All" matches every job."""
    assert all('job=~"specdec.*"' in expression for expression in curves() if re.search(r"\bup\{", expression))


def test_every_metric_is_on_the_dashboard_or_is_a_part_of_one_that_is() -> None:
    """The metrics left out are totals of other metrics."""
    shown = {each.removesuffix("_bucket").removesuffix("_count") for curve in curves() for each in metrics(curve)}
    left_out = {
        "specdec_orchestrator_samples_total",
        "specdec_orchestrator_prompt_tokens_cached_total",
        "specdec_verifier_prompt_tokens_total",
    }
    assert {name(family) for family in (*families(), *of_http())} - shown == left_out


def test_panels_lie_beside_each_other() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    titles = [(panel["title"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(titles)) == len(titles)
    assert all(panel["description"].endswith(".") for panel in panels())
