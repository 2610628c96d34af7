"""Prometheus metric families.

Names begin with `specdec_` and the service's role. Values are in base units: seconds, tokens, ratios from 0 to 1. If
vLLM has the same metric, the rest of the name is vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from specdec.serving import watched
from specdec.serving.callers.guard import refused_calls
from specdec.serving.histogram import Histogram
from specdec.serving.mux.stream import ByteCounters
from specdec.v2 import model_pb2

Values = TypeVar("Values", bound=tuple[str, ...])
"""Label values."""


class Families:
    """Collects the metric families of a service in its list `made`."""

    def __init__(self, role: str) -> None:
        self._role = role
        self.made: list[Metric] = []

    def counter(self, name: str, help: str, value: float) -> None:
        """Add a counter. Prometheus appends `_total` to its name."""
        self.made.append(CounterMetricFamily(self._name(name), help, value))

    def counters(self, name: str, help: str, labels: tuple[str, ...], values: Mapping[Values, float]) -> None:
        """Add a counter per tuple of label values."""
        self._add(CounterMetricFamily(self._name(name), help, labels=labels), values)

    def gauge(self, name: str, help: str, value: float) -> None:
        self.made.append(GaugeMetricFamily(self._name(name), help, value))

    def gauges(self, name: str, help: str, labels: tuple[str, ...], values: Mapping[Values, float]) -> None:
        """Add a gauge per tuple of label values."""
        self._add(GaugeMetricFamily(self._name(name), help, labels=labels), values)

    def _add(self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Values, float]) -> None:
        for value, count in values.items():
            family.add_metric(value, count)
        self.made.append(family)

    def histogram(self, name: str, help: str, found: Histogram) -> None:
        self.made.append(HistogramMetricFamily(self._name(name), help, _buckets(found), found.total))

    def histograms(self, name: str, help: str, labels: tuple[str, ...], found: Mapping[Values, Histogram]) -> None:
        """Add a histogram per tuple of label values."""
        family = HistogramMetricFamily(self._name(name), help, labels=labels)
        for value, histogram in found.items():
            family.add_metric(value, _buckets(histogram), histogram.total)
        self.made.append(family)

    def process(self, pod: model_pb2.PodInfo, serving: bool) -> None:
        """Add the process metrics common to all services."""
        self.gauge("serving", "1 if the service can serve requests, else 0; a drain does not change it.", serving)
        self.made.append(InfoMetricFamily(self._name("build"), "Version of the service.", {"version": pod.version}))
        self.files()
        self.counters(
            "refused_calls",
            "Calls refused before their requests were read, by reason: no key, an unknown key, a certificate with "
            "another name, an unknown method.",
            ("reason",),
            {(reason,): count for reason, count in refused_calls.copy().items()},
        )

    def files(self) -> None:
        """Add the metrics of watched files."""
        self.gauges(
            "files_refused",
            "Watched file sets whose current contents are unusable, by kind: TLS files, tenants, models, versions.",
            ("what",),
            {(what,): count for what, count in watched.refused().items()},
        )

    def traffic(self, traffic: ByteCounters) -> None:
        """Add the message traffic of a service with sessions."""
        self.counter("session_sent_bytes", "Bytes of session messages sent to orchestrators.", traffic.sent)
        self.counter(
            "session_received_bytes", "Bytes of session messages received from orchestrators.", traffic.received
        )

    def _name(self, name: str) -> str:
        return f"specdec_{self._role}_{name}"


def _buckets(found: Histogram) -> list[tuple[str, float]]:
    """Return a histogram's cumulative counts by upper bound."""
    reached, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
        reached += count
        buckets.append((bound, reached))
    return buckets
