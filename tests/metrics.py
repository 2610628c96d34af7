"""Every metric of the three services, for the page: `python -m tests.metrics` prints the table of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from draft_service.metrics import metrics as of_draft
from orchestrator.metrics import metrics as of_orchestrator
from orchestrator.stats import OrchestratorStats
from specdec.serving.metrics.families import Families
from specdec.serving.mux.stream import Traffic
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2
from verifier_service.backend.stats import VerifierStats
from verifier_service.metrics import metrics as of_verifier


def families() -> Iterator[Metric]:
    """Yield the metrics of services that have just started."""
    told = generation_pb2.GenerationServiceGetStatsResponse()
    yield from of_orchestrator(told, {("", ""): OrchestratorStats()}, {})
    yield from of_verifier(verifier_pb2.GetStatsResponse(kv_tokens=1), VerifierStats())
    yield from of_messages("verifier")
    yield from of_draft(draft_pb2.DraftServiceGetStatsResponse())
    yield from of_messages("draft")


def of_messages(role: str) -> list[Metric]:
    """Return the metrics of the messages of a service with sessions."""
    found = Families(role)
    found.traffic(Traffic())
    return found.made


def name(family: Metric) -> str:
    """Return the name of a metric as the page has it: with what its type adds."""
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def served_names() -> set[str]:
    """Return the names of all time series, as Prometheus knows them."""
    found: set[str] = set()
    for each in families():
        found |= {name(each) + part for part in (("_bucket", "_sum", "_count") if each.type == "histogram" else ("",))}
    return found


def table() -> str:
    """Return the table in Markdown."""

    def row(each: Metric) -> str:
        return f"| `{name(each)}` | {each.type} | {each.documentation} |"

    return "\n".join(("| Metric | Type | Meaning |", "|---|---|---|", *map(row, families())))


if __name__ == "__main__":
    print(table())
