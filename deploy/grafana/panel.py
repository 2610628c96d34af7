"""A panel of the dashboard, and the expressions that panels are made of."""

from __future__ import annotations

from dataclasses import dataclass

JOB = '{job=~"$job"}'
"""Selects the scrape jobs that are chosen at the top of the dashboard."""


@dataclass(frozen=True)
class Panel:
    """One panel: curves over time. `unit` is one of Grafana's units; `curves` maps legends to expressions."""

    title: str
    unit: str
    curves: dict[str, str]
    meaning: str


def rate(counter: str, labels: str = "") -> str:
    """Return a counter's rate per second over all pods, by `labels` if given."""
    by = f" by ({labels})" if labels else ""
    return f"sum{by} (rate({counter}{JOB}[$__rate_interval]))"


def share(part: str, whole: str, labels: str = "") -> str:
    """Return the ratio of the rates of two counters, by `labels` if given."""
    return f"{rate(part, labels)} / {rate(whole, labels)}"


def total(gauge: str, labels: str = "") -> str:
    """Return the sum of a gauge over all pods, by `labels` if given."""
    by = f" by ({labels})" if labels else ""
    return f"sum{by} ({gauge}{JOB})"


OF_ROLE = {
    "orchestrator": "specdec_orchestrator_serving",
    "verifier": "specdec_verifier_serving",
    "draft": "specdec_draft_serving",
    "openai": "specdec_openai_requests_running",
}
"""A metric that only processes of a role have."""


def by_role(expression: str) -> dict[str, str]:
    """Return curves of a metric that every process has, named by role and address."""
    return {
        f"{role} {{{{instance}}}}": f"{expression} and on (job, instance) {its_own}{JOB}"
        for role, its_own in OF_ROLE.items()
    }


def quantiles(histogram: str, *wanted: float) -> dict[str, str]:
    """Return curves of these quantiles of a histogram over all pods."""
    found = rate(f"{histogram}_bucket", "le")
    return {f"p{100 * each:g}": f"histogram_quantile({each}, {found})" for each in wanted}
