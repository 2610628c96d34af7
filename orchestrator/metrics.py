"""The metrics of an orchestrator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client.metrics_core import Metric

from orchestrator.models.stats import FINISH_REASONS, OrchestratorStats
from orchestrator.text.request_timeline import FailoverReason
from specdec.serving.errors import STATUS, PeerLostError, PermissionDeniedError
from specdec.serving.metrics.families import Families
from specdec.v2 import generation_pb2

ERRORS = {
    *(kind.reason for kind in STATUS if kind not in (PeerLostError, PermissionDeniedError)),
    *("VERIFIER_LOST", "DRAFT_REQUIRED", "MODEL_CHANGED", "MODEL_UNREADABLE"),
    *("WRONG_TENANT", "LEARNING_NOT_PERMITTED"),
}
"""Error reasons of failed requests."""

FALLBACKS = ("no_draft", "draft_lost", "draft_useless", "tokenizer_mismatch", "protocol_mismatch", "late")
"""Reasons why a text continues without the draft it asked for."""

STATES = ("closed", "half_open", "open", "unfit")
"""States of pods, from best to worst: their circuit breaker's, or unfit."""

MODEL = ("model_name", "revision")
"""Labels of counts by revision. Both are empty for requests for unknown models."""

Key = tuple[str, ...]


def metrics(
    reported: generation_pb2.GenerationServiceGetStatsResponse,
    stats: Mapping[tuple[str, str], OrchestratorStats],
    reached: Mapping[tuple[str, str], bool],
) -> list[Metric]:
    """Return the metrics of an orchestrator. `reported`: its answer to `GetStats`; `stats`: its counts by the names of
    model and revision; `reached`: whether the last check found a verifier of a revision.

    Reasons without an occurrence are reported as 0: if a counter starts at 1, Prometheus misses its first increase.
    """
    found = Families("orchestrator")

    served = {key: counts for key, counts in stats.items() if any(key)}  # without requests for unknown models

    def by_model(count: Callable[[OrchestratorStats], float]) -> dict[Key, float]:
        return {key: count(counts) for key, counts in served.items()}

    def by_reason(reasons: Callable[[OrchestratorStats], Mapping[str, float]]) -> dict[Key, float]:
        return {(*key, reason): count for key, counts in served.items() for reason, count in reasons(counts).items()}

    found.process(reported.pod, reported.serving)
    found.gauges(
        "verifier_reachable",
        "1 if a verifier of the model answers the check made every second, else 0.",
        MODEL,
        reached,
    )
    found.gauges(
        "revision_share",
        "Share of a model's requests routed to a revision.",
        MODEL,
        _shares(reported.revisions),
    )
    found.gauges("num_requests_running", "Requests in flight.", MODEL, by_model(lambda counts: counts.running_requests))
    found.gauge("num_prompts_waiting", "Prompts waiting for tokenisation.", reported.waiting_prompts)
    found.counters(
        "requests",
        "Requests received, by tenant class.",
        (*MODEL, "tenant_class"),
        {(*key, name): count for key, counts in stats.items() for name, count in counts.by_class.items()},
    )
    found.counters(
        "failed_requests",
        "Requests that ended with an error, by reason and tenant class.",
        (*MODEL, "reason", "tenant_class"),
        {
            (*key, reason, name): counts.failed[reason, name]
            for key, counts in stats.items()
            for name in counts.by_class
            for reason in sorted(ERRORS | {reason for reason, _ in counts.failed})
        },
    )
    found.counters(
        "cancelled_requests", "Requests cancelled by their callers.", MODEL, by_model(lambda counts: counts.cancelled)
    )
    found.gauges("num_samples_running", "Samples in flight.", MODEL, by_model(lambda counts: len(counts.running)))
    found.counters(
        "samples", "Samples that ended, for any reason.", MODEL, by_model(lambda counts: counts.ended_samples)
    )
    found.counters(
        "prompt_tokens", "Prompt tokens of ended samples.", MODEL, by_model(lambda counts: counts.prompt_tokens)
    )
    found.counters(
        "prompt_tokens_cached",
        "Prompt tokens of ended samples found in a verifier's KV cache.",
        MODEL,
        by_model(lambda counts: counts.cached_tokens),
    )
    found.counters(
        "generation_tokens",
        "Tokens generated in ended samples.",
        MODEL,
        by_model(lambda counts: counts.generated_tokens),
    )
    found.counters(
        "request_success",
        "Samples completed before their deadline, by finish reason; late, failed and cancelled ones are not counted.",
        (*MODEL, "finished_reason"),
        by_reason(lambda counts: {reason: counts.finished[reason] for reason in FINISH_REASONS.values()}),
    )
    found.counters(
        "goodput_tokens",
        "Tokens generated in samples completed before their deadline; its rate is the goodput.",
        MODEL,
        by_model(lambda counts: counts.finished_tokens),
    )
    found.counters(
        "failover_events",
        "Failover events of texts, by reason.",
        (*MODEL, "reason"),
        by_reason(lambda counts: dict.fromkeys(get_args(FailoverReason), 0) | dict(counts.failover_events)),
    )
    found.counters(
        "fallback_seconds",
        "Seconds that texts continued without the draft they asked for, by reason. 0 if no drafts are configured.",
        (*MODEL, "reason"),
        by_reason(lambda counts: dict.fromkeys(FALLBACKS, 0.0) | counts.fallback_seconds),
    )
    found.histograms(
        "time_to_first_token_seconds",
        "Seconds from the tokenised prompt to the first token.",
        MODEL,
        {key: counts.first_token for key, counts in served.items()},
    )
    found.histograms(
        "inter_token_latency_seconds",
        "Seconds between tokens; tokens that arrive together share the interval equally.",
        MODEL,
        {key: counts.between_tokens for key, counts in served.items()},
    )
    found.histograms(
        "e2e_request_latency_seconds",
        "Seconds from the tokenised prompt to the end of the sample.",
        MODEL,
        {key: counts.whole for key, counts in served.items()},
    )
    states: dict[Key, str] = {}  # the worst one of each pod: revisions that share a pod judge it separately
    sessions: Counter[Key] = Counter()
    for role, views in (("verifier", reported.verifiers), ("draft", reported.drafts)):
        for view in views:
            pod, state = (role, view.address), "unfit" if view.unfit_reason else _state(view.breaker)
            states[pod] = max(state, states.get(pod, state), key=STATES.index)
            sessions[pod] += view.sessions
    pods: Counter[Key] = Counter({(role, state): 0 for role in ("verifier", "draft") for state in STATES})
    pods.update((role, state) for (role, _), state in states.items())
    found.gauges("pods", "Pods, by role and state: the circuit breaker's, or unfit.", ("role", "state"), pods)
    found.gauges("pod_sessions", "Open sessions of this orchestrator at a pod.", ("role", "address"), sessions)
    return found.made


def _shares(revisions: Iterable[generation_pb2.RevisionView]) -> dict[Key, float]:
    """Return each revision's share of its model's requests, from 0 to 1."""
    served = [revision for revision in revisions if not revision.leaving]
    totals: defaultdict[str, float] = defaultdict(float)
    for revision in served:
        totals[revision.model] += revision.share
    return {
        (revision.model, revision.revision): revision.share / (totals[revision.model] or 1.0) for revision in served
    }


def _state(breaker: generation_pb2.BreakerState.ValueType) -> str:
    return generation_pb2.BreakerState.Name(breaker).removeprefix("BREAKER_STATE_").lower()
