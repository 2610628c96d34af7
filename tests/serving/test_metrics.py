"""Metrics are served as Prometheus reads them, named as it asks for, and documented."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from specdec.serving.histogram import Histogram
from specdec.serving.metrics import endpoint
from specdec.serving.metrics.endpoint import MetricsEndpoint
from specdec.serving.metrics.families import Families
from tests.metrics import families, table

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


async def scraped(port: int) -> dict[str, Metric]:
    return {each.name: each for each in text_string_to_metric_families(await asyncio.to_thread(get, port))}


async def test_a_scrape_collects_in_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    found = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        found.observe(value)
    found.observe(2.0, 3)

    def collect() -> Iterable[Metric]:
        assert asyncio.get_running_loop() is loop
        made = Families("verifier")
        made.counter("steps", "Steps.", 3)
        made.counters("failed", "Failures.", ("reason",), {("a",): 1, ('b"\n',): 2})
        made.gauges("pods", "Pods.", ("role", "state"), {("draft", "open"): 1})
        made.histogram("time_seconds", "Seconds.", found)
        return made.made

    serving = MetricsEndpoint("127.0.0.1", 0, collect)
    try:
        metrics = await scraped(serving.port)
    finally:
        await serving.close()
    assert metrics["specdec_verifier_steps"].samples[0].value == 3
    assert {each.labels["reason"]: each.value for each in metrics["specdec_verifier_failed"].samples} == {
        "a": 1,
        'b"\n': 2,
    }
    (pods,) = metrics["specdec_verifier_pods"].samples
    assert pods.labels == {"role": "draft", "state": "open"}
    times = {
        each.labels.get("le", each.name.rpartition("_")[2]): each.value
        for each in metrics["specdec_verifier_time_seconds"].samples
    }
    assert times == {"1.0": 2, "2.0": 6, "+Inf": 7, "count": 7, "sum": 16.0}
    assert metrics["process_cpu_seconds"].samples


async def test_a_stuck_event_loop_fails_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is stuck in the scrape itself."""
    monkeypatch.setattr(endpoint, "COLLECT_SECONDS", 0.1)
    serving = MetricsEndpoint("127.0.0.1", 0, list)
    try:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(serving.port)
        await scraped(serving.port)
    finally:
        await serving.close()


@given(st.lists(st.floats(0, 1000)))
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    found = Histogram()
    for value in values:
        found.observe(value)
    assert sum(found.counts) == len(values)
    assert found.total == pytest.approx(sum(values))
    for index, bound in enumerate(found.bounds):
        assert sum(found.counts[: index + 1]) == sum(value <= bound for value in values)


def test_names_and_helps_are_as_prometheus_asks_for() -> None:
    names = [each.name for each in families()]
    assert len(set(names)) == len(names)
    for each in families():
        assert re.fullmatch(r"specdec_(orchestrator|verifier|draft)_[a-z0-9_]+", each.name)
        assert re.fullmatch(r"[A-Z1].*\.", each.documentation), each.name
        assert not each.name.endswith("_total")  # which is what counters end in on the wire
        assert each.name.endswith("_seconds") or each.type != "histogram"


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()
