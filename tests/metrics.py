"""Every metric of the three services, for the page: `python -m tests.metrics` prints the table of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from draft_service.metrics import metrics as of_draft
from orchestrator.metrics import metrics as of_orchestrator
from orchestrator.stats import OrchestratorStats
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2
from verifier_service.backend.stats import VerifierStats
from verifier_service.metrics import metrics as of_verifier


def families() -> Iterator[Metric]:
    """Yield the metrics of services that have just started."""
    yield from of_orchestrator(generation_pb2.GenerationServiceGetStatsResponse(), OrchestratorStats())
    yield from of_verifier(verifier_pb2.GetStatsResponse(kv_tokens=1), VerifierStats())
    yield from of_draft(draft_pb2.DraftServiceGetStatsResponse())


def table() -> str:
    """Return the table in Markdown."""

    def row(each: Metric) -> str:
        name = f"{each.name}_total" if each.type == "counter" else each.name
        name = f"{name}_info" if each.type == "info" else name
        return f"| `{name}` | {each.type} | {each.documentation} |"

    return "\n".join(("| Metric | Type | Meaning |", "|---|---|---|", *map(row, families())))


if __name__ == "__main__":
    print(table())
