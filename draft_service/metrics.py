"""Statistics of a draft service: its load and the accuracy of its proposals, also as metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from specdec.serving.metrics.families import Families
from specdec.v2 import draft_pb2


@dataclass
class DraftStats:
    """Counters of a draft service; written by the draft loop's thread, read by any."""

    busy: float = 0.0  # seconds spent in steps
    committed: int = 0  # tokens committed in sessions
    guessed: int = 0  # committed tokens found in the session's tree
    sent: int = 0  # candidates in messages, repeated ancestors included
    messages: int = 0


def metrics(told: draft_pb2.DraftServiceGetStatsResponse) -> list[Metric]:
    """Return the metrics for a `GetStats` response."""
    found = Families("draft")
    found.process(told.pod, told.serving)
    found.gauge("num_sessions", "Open sessions.", told.sessions)
    usage = told.kv_held_tokens / told.kv_tokens if told.kv_tokens else 0.0
    found.gauge("kv_cache_usage_perc", "KV cache usage by sessions, from 0 to 1.", usage)
    found.counter("steps", "Steps.", told.steps)
    found.counter("busy_seconds", "Seconds spent in steps.", told.busy_us / 1e6)
    found.counter("committed_tokens", "Tokens committed in sessions.", told.committed_tokens)
    found.counter("guessed_tokens", "Committed tokens that were in the draft's token tree.", told.guessed_tokens)
    found.counter("sent_candidates", "Candidates sent, repeated ones included.", told.sent_candidates)
    found.counter("sent_messages", "Messages of candidates.", told.sent_messages)
    found.gauge("kept_texts", "Texts kept to learn from.", told.kept_texts)
    found.gauge("kept_tokens", "Tokens of texts kept to learn from.", told.kept_tokens)
    found.gauge("kept_age_seconds", "Age of the oldest text kept to learn from.", told.kept_age_us / 1e6)
    found.gauge("fast_paths_off", "Fast paths disabled in this process.", len(told.fast_paths_off))
    return found.made
