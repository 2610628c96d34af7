"""The metrics of an orchestrator."""

from __future__ import annotations

from collections import Counter

from prometheus_client.metrics_core import Metric

from orchestrator.stats import OrchestratorStats
from specdec.serving.metrics.families import Families
from specdec.v2 import generation_pb2


def metrics(told: generation_pb2.GenerationServiceGetStatsResponse, stats: OrchestratorStats) -> list[Metric]:
    """Return the metrics of an orchestrator, of what it tells in `GetStats` and of its own counts."""
    found = Families("orchestrator")
    found.process(told.pod, told.serving)
    found.gauge("num_requests_running", "Requests that are under way.", told.running_requests)
    found.gauge("num_prompts_waiting", "Prompts that wait to be tokenised.", told.waiting_prompts)
    classes = {(name,): count for name, count in stats.by_class.items()}
    found.counters("requests", "Requests that came, by the class of their tenants.", ("tenant_class",), classes)
    found.counters(
        "failed_requests",
        "Requests that ended with an error, by its reason and the class of their tenants.",
        ("reason", "tenant_class"),
        stats.failed,
    )
    found.counter("cancelled_requests", "Requests whose callers left.", told.cancelled_requests)
    found.gauge("num_samples_running", "Samples that are under way.", told.running_samples)
    found.counter("samples", "Samples that are over, however they ended.", told.ended_samples)
    found.counter("prompt_tokens", "Tokens of their prompts.", told.prompt_tokens)
    found.counter("prompt_tokens_cached", "Tokens of them that a verifier had in memory already.", told.cached_tokens)
    found.counter("generation_tokens", "Tokens generated in them.", told.generated_tokens)
    events = {(reason,): count for reason, count in told.failover_events.items()}
    found.counters("failover_events", "Changes of pods under texts, by reason.", ("reason",), events)
    found.histogram(
        "time_to_first_token_seconds", "Seconds from a tokenised prompt to its first token.", stats.first_token
    )
    found.histogram(
        "inter_token_latency_seconds",
        "Seconds from token to token; tokens that came together share theirs.",
        stats.between_tokens,
    )
    found.histogram(
        "e2e_request_latency_seconds", "Seconds from a tokenised prompt to the end of a sample.", stats.whole
    )
    pods: Counter[tuple[str, ...]] = Counter()
    sessions: dict[tuple[str, ...], float] = {}
    for role, views in (("verifier", told.verifiers), ("draft", told.drafts)):
        for view in views:
            state = generation_pb2.BreakerState.Name(view.breaker).removeprefix("BREAKER_STATE_").lower()
            pods[role, "unfit" if view.unfit_reason else state] += 1
            sessions[role, view.address] = view.sessions
    found.gauges("pods", "Pods, by role and the state of their circuit breaker.", ("role", "state"), pods)
    found.gauges("pod_sessions", "Sessions of this orchestrator at a pod.", ("role", "pod"), sessions)
    return found.made
