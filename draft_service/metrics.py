"""The metrics of a draft service."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from specdec.serving.metrics.families import Families
from specdec.v2 import draft_pb2


def metrics(told: draft_pb2.DraftServiceGetStatsResponse) -> list[Metric]:
    """Return the metrics for a `GetStats` response."""
    found = Families("draft")
    found.process(told.pod, told.serving)
    found.gauge("num_sessions", "Sessions that are open.", told.sessions)
    usage = told.kv_held_tokens / told.kv_tokens if told.kv_tokens else 0.0
    found.gauge("kv_cache_usage_perc", "Part of the KV cache that sessions hold; 1 is all.", usage)
    found.counter("steps", "Steps.", told.steps)
    found.counter("busy_seconds", "Seconds spent in steps.", told.busy_us / 1e6)
    found.counter("committed_tokens", "Tokens that became final in sessions.", told.committed_tokens)
    found.counter("guessed_tokens", "Tokens of them that the draft had guessed.", told.guessed_tokens)
    found.counter("sent_candidates", "Candidates sent, those included that are repeated.", told.sent_candidates)
    found.counter("sent_messages", "Messages of candidates.", told.sent_messages)
    found.gauge("fast_paths_off", "Fast paths that are off in this process.", len(told.fast_paths_off))
    return found.made
