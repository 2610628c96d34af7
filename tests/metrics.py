"""All metrics: `python -m tests.metrics` prints the table of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from starlette.types import Receive, Scope, Send

from draft_service.metrics import metrics as of_draft
from orchestrator.metrics import metrics as of_orchestrator
from orchestrator.models.stats import OrchestratorStats
from specdec.openai_api.metrics import Counted
from specdec.serving.metrics.families import Families
from specdec.serving.mux.stream import ByteCounters
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2
from verifier_service.backend.stats import VerifierStats
from verifier_service.metrics import metrics as of_verifier


def families() -> Iterator[Metric]:
    """Yield the metrics of the three services right after start-up."""
    told = generation_pb2.GenerationServiceGetStatsResponse()
    yield from of_orchestrator(told, {("", ""): OrchestratorStats()}, {})
    yield from of_verifier(verifier_pb2.GetStatsResponse(kv_tokens=1), VerifierStats())
    yield from of_messages("verifier")
    yield from of_draft(draft_pb2.DraftServiceGetStatsResponse())
    yield from of_messages("draft")


def of_messages(role: str) -> list[Metric]:
    """Return the message metrics of a service with sessions."""
    found = Families(role)
    found.traffic(ByteCounters())
    return found.made


def of_http() -> list[Metric]:
    """Return the metrics of the HTTP server right after start-up."""

    async def unasked(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("this application is never asked")

    return Counted(unasked, ()).metrics()


def name(family: Metric) -> str:
    """Return a metric's name with its type's suffix, as on the page."""
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def served_names() -> set[str]:
    """Return the names of all time series as in Prometheus."""
    found: set[str] = set()
    for each in (*families(), *of_http()):
        found |= {name(each) + part for part in (("_bucket", "_sum", "_count") if each.type == "histogram" else ("",))}
    return found


def table() -> str:
    def row(each: Metric) -> str:
        labels = ", ".join(f"`{label}`" for label in getattr(each, "_labelnames", ()))
        return f"| `{name(each)}` | {each.type} | {labels} | {each.documentation} |"

    rows = map(row, (*families(), *of_http()))
    return "\n".join(("| Metric | Type | Labels | Meaning |", "|---|---|---|---|", *rows))


if __name__ == "__main__":
    print(table())
