"""Metrics are valid for Prometheus, follow its naming rules, and are documented."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import socket
import struct
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
    """`get` blocks the loop during the scrape."""
    serving = MetricsEndpoint("127.0.0.1", 0, list)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(endpoint, "COLLECT_SECONDS", 0.1)
            with pytest.raises(urllib.error.HTTPError, match="503"):
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
        assert not each.name.endswith("_total")  # a counter gets this suffix on the wire
        assert each.name.endswith("_seconds") or each.type != "histogram"


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()


async def test_connections_beyond_the_limit_are_closed_and_places_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is low here: the system delays connections while more than five wait to be accepted."""
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 4)
    serving = MetricsEndpoint("127.0.0.1", 0, list)
    try:
        silent = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(endpoint.MAX_CONNECTIONS)]
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
        for _, each in [*silent, (reader, writer)]:
            each.close()
        async with asyncio.timeout(5.0):
            while True:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    assert "python_info" in await asyncio.to_thread(get, serving.port)
                    break
                await asyncio.sleep(0.01)
    finally:
        await serving.close()


def test_a_burst_of_connections_waits_to_be_accepted() -> None:
    """The system drops connections beyond the backlog, and the other end tries again after a second."""
    server = endpoint._Server("127.0.0.1", 0)  # accepts none yet
    try:
        for _ in range(endpoint.MAX_CONNECTIONS):
            socket.create_connection(("127.0.0.1", server.server_port), timeout=0.5).close()
    finally:
        server.server_close()


async def test_who_breaks_off_or_says_nothing_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.05)
    serving = MetricsEndpoint("127.0.0.1", 0, list)
    try:
        broken = socket.create_connection(("127.0.0.1", serving.port))
        broken.sendall(b"GET /metr")
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # disconnects with a reset
        broken.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()
    finally:
        await serving.close()
    assert "Traceback" not in capfd.readouterr().err
