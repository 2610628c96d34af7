"""Statistics of a draft service: its load and the accuracy of its proposals, also as metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from specdec.serving.metrics.families import Families
from specdec.v2 import draft_pb2


@dataclass
class DraftStats:
    """Counters of a draft service; written by the draft loop's thread, read by any thread."""

    busy: float = 0.0  # seconds spent in steps
    committed: int = 0  # tokens committed in sessions
    guessed: int = 0  # committed tokens found in the session's tree
    sent: int = 0  # candidates in messages, repeated ancestors included
    messages: int = 0


STATE_PREFIX = "DRAFT_VERSION_STATE_"


def metrics(stats: draft_pb2.DraftServiceGetStatsResponse) -> list[Metric]:
    """Return the metrics for a `GetStats` response."""
    found = Families("draft")
    found.process(stats.pod, stats.serving)
    found.gauge("num_sessions", "Open sessions.", stats.sessions)
    usage = stats.kv_held_tokens / stats.kv_tokens if stats.kv_tokens else 0.0
    found.gauge("kv_cache_usage_perc", "KV cache usage by sessions, from 0 to 1.", usage)
    found.counter("steps", "Steps.", stats.steps)
    found.counter("busy_seconds", "Seconds spent in steps.", stats.busy_us / 1e6)
    found.counter("committed_tokens", "Tokens committed in sessions.", stats.committed_tokens)
    found.counter("guessed_tokens", "Committed tokens that were in the draft's token tree.", stats.guessed_tokens)
    found.counter("sent_candidates", "Candidates sent, repeated ones included.", stats.sent_candidates)
    found.counter("sent_messages", "Candidate messages sent.", stats.sent_messages)
    found.gauge("kept_texts", "Texts kept to learn from.", stats.kept_texts)
    found.gauge("kept_tokens", "Tokens of texts kept to learn from.", stats.kept_tokens)
    found.gauge("kept_age_seconds", "Age of the oldest text kept to learn from.", stats.kept_age_us / 1e6)
    found.gauge(
        "kept_logprob_bytes", "Bytes of the target's log-probabilities kept to learn from.", stats.kept_logprob_bytes
    )
    _versions(found, stats)
    found.gauge("fast_paths_off", "Fast paths disabled in this process.", len(stats.fast_paths_off))
    return found.made


def _versions(found: Families, stats: draft_pb2.DraftServiceGetStatsResponse) -> None:
    """Add the metrics of versions; without `--versions` they have no samples."""
    label = ("version",)
    found.gauges(
        "version_state",
        "1 for the current state of a version of the draft's model.",
        ("version", "state"),
        {(version.name, state_name(version.state)): 1.0 for version in stats.versions},
    )
    found.gauges(
        "version_sessions",
        "Open sessions of a version.",
        label,
        {(version.name,): version.sessions for version in stats.versions},
    )
    found.counters(
        "version_committed_tokens",
        "Tokens committed in sessions of a version.",
        label,
        {(version.name,): version.committed_tokens for version in stats.versions},
    )
    found.counters(
        "version_guessed_tokens",
        "Committed tokens of a version that were in the draft's token tree.",
        label,
        {(version.name,): version.guessed_tokens for version in stats.versions},
    )
    found.counters(
        "version_passes",
        "Forward passes of a version.",
        label,
        {(version.name,): version.passes for version in stats.versions},
    )
    found.counters(
        "version_busy_seconds",
        "Seconds spent in passes of a version.",
        label,
        {(version.name,): version.busy_us / 1e6 for version in stats.versions},
    )
    found.counters(
        "version_outcomes",
        "Ended trials of versions, and refused versions, by outcome.",
        ("outcome",),
        {(outcome,): count for outcome, count in stats.version_outcomes.items()},
    )


def state_name(state: draft_pb2.DraftVersionState.ValueType) -> str:
    """Return the name of a version's state, as in "canary"."""
    return draft_pb2.DraftVersionState.Name(state).removeprefix(STATE_PREFIX).lower()
