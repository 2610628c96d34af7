"""The metrics of an orchestrator."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from prometheus_client.metrics_core import Metric

from orchestrator.failover_events import FailoverReason
from orchestrator.stats import FINISH_REASONS, OrchestratorStats
from specdec.serving.errors import STATUS, PeerLostError, PermissionDeniedError
from specdec.serving.metrics.families import Families
from specdec.v2 import generation_pb2

ERRORS = {
    *(kind.reason for kind in STATUS if kind not in (PeerLostError, PermissionDeniedError)),
    *("VERIFIER_LOST", "DRAFT_REQUIRED", "MODEL_CHANGED", "WRONG_TENANT"),
}
"""Reasons of errors that end requests."""

FALLBACKS = ("no_draft", "draft_lost", "draft_useless", "tokenizer_mismatch", "late")
"""Reasons for which texts go on without a draft that they want."""

STATES = ("closed", "open", "half_open", "unfit")
"""States of pods: those of circuit breakers, and of a pod that serves something else."""


def metrics(
    told: generation_pb2.GenerationServiceGetStatsResponse, stats: OrchestratorStats, *, reaches_verifier: bool
) -> list[Metric]:
    """Return the metrics of an orchestrator, of what it tells in `GetStats` and of its own counts. `reaches_verifier`:
    the last look found a verifier.

    Reasons that have not occurred yet count 0: of a counter that begins with 1, Prometheus misses the first increase.
    """
    found = Families("orchestrator")
    found.process(told.pod, told.serving)
    found.gauge(
        "verifier_reachable",
        "1 while a verifier answers that has the model, asked every second; else 0.",
        reaches_verifier,
    )
    found.gauge("num_requests_running", "Requests that are under way.", told.running_requests)
    found.gauge("num_prompts_waiting", "Prompts that wait to be tokenised.", told.waiting_prompts)
    classes = {(name,): count for name, count in stats.by_class.items()}
    found.counters("requests", "Requests that came, by the class of their tenants.", ("tenant_class",), classes)
    found.counters(
        "failed_requests",
        "Requests that ended with an error, by its reason and the class of their tenants.",
        ("reason", "tenant_class"),
        {(reason, name): stats.failed[reason, name] for name in stats.by_class for reason in sorted(ERRORS)}
        | stats.failed,
    )
    found.counter("cancelled_requests", "Requests whose callers left.", told.cancelled_requests)
    found.gauge("num_samples_running", "Samples that are under way.", told.running_samples)
    found.counter("samples", "Samples that are over, however they ended.", told.ended_samples)
    found.counter("prompt_tokens", "Tokens of their prompts.", told.prompt_tokens)
    found.counter("prompt_tokens_cached", "Tokens of them that a verifier had in memory already.", told.cached_tokens)
    found.counter("generation_tokens", "Tokens generated in them.", told.generated_tokens)
    found.counters(
        "request_success",
        "Samples whose texts became complete, by the reason; not those that were late, failed or were cancelled.",
        ("finished_reason",),
        {(reason,): stats.finished[reason] for reason in FINISH_REASONS.values()},
    )
    found.counter("goodput_tokens", "Tokens generated in those. Goodput is the rate of this.", stats.finished_tokens)
    events = dict.fromkeys(get_args(FailoverReason), 0) | dict(told.failover_events)
    found.counters(
        "failover_events",
        "Changes of pods under texts, by reason.",
        ("reason",),
        {(reason,): count for reason, count in events.items()},
    )
    fallbacks = dict.fromkeys(FALLBACKS, 0.0) | stats.fallback_seconds
    found.counters(
        "fallback_seconds",
        "Seconds for which texts have gone on without a draft that they wanted, by reason; 0 where no draft is set up.",
        ("reason",),
        {(reason,): seconds for reason, seconds in fallbacks.items()},
    )
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
    pods: Counter[tuple[str, ...]] = Counter({(role, state): 0 for role in ("verifier", "draft") for state in STATES})
    sessions: dict[tuple[str, ...], float] = {}
    for role, views in (("verifier", told.verifiers), ("draft", told.drafts)):
        for view in views:
            pods[role, "unfit" if view.unfit_reason else _state(view.breaker)] += 1
            sessions[role, view.address] = view.sessions
    found.gauges("pods", "Pods, by role and the state of their circuit breaker.", ("role", "state"), pods)
    found.gauges("pod_sessions", "Sessions of this orchestrator at a pod.", ("role", "pod"), sessions)
    return found.made


def _state(breaker: generation_pb2.BreakerState.ValueType) -> str:
    """Return the name of a circuit breaker's state."""
    return generation_pb2.BreakerState.Name(breaker).removeprefix("BREAKER_STATE_").lower()
