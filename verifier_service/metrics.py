"""The metrics of a verifier."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from specdec.serving.metrics.families import Families
from specdec.v2 import verifier_pb2
from verifier_service.backend.stats import VerifierStats
from verifier_service.speculation.controller import Mode


def metrics(told: verifier_pb2.GetStatsResponse, stats: VerifierStats) -> list[Metric]:
    """Return the metrics for a `GetStats` response and the verifier's own counters."""
    found = Families("verifier")
    found.process(told.pod, told.serving)
    found.gauge("num_sessions", "Sessions that are open.", told.sessions)
    found.gauge("num_requests_running", "Sessions that have KV memory.", told.running)
    waiting = max(0, told.waiting - told.throttled)
    found.gauge("num_requests_waiting", "Sessions that wait for KV memory, and not for their readers.", waiting)
    found.gauge(
        "num_requests_throttled", "Sessions without KV memory that are far ahead of their readers.", told.throttled
    )
    usage = told.kv_held_tokens / told.kv_tokens
    found.gauge("kv_cache_usage_perc", "Part of the KV cache that sessions hold; 1 is all.", usage)
    free = told.kv_tokens - told.kv_held_tokens - told.kv_cached_tokens
    tokens: dict[tuple[str, ...], float] = {
        ("held",): told.kv_held_tokens,
        ("cached",): told.kv_cached_tokens,
        ("free",): free,
    }
    found.gauges("kv_cache_tokens", "Tokens of the KV cache, by what they are used for.", ("state",), tokens)
    found.counter("prompt_tokens", "Tokens that sessions came with when they got KV memory.", told.prompt_tokens)
    found.counter("prefix_cache_queries", "Tokens that were looked for in the KV cache.", told.prompt_tokens)
    found.counter("prefix_cache_hits", "Tokens of them that were found there.", told.cached_tokens)
    found.counter("generation_tokens", "Tokens committed.", told.committed_tokens)
    found.counter("num_preemptions", "Times that a session lost its KV memory to others.", told.preemptions)
    found.counter("step_rows", "Rows of all steps.", told.rows)
    found.histogram("step_time_seconds", "Seconds of a step.", stats.step_seconds)
    found.counters(
        "step_part_seconds",
        "Seconds by part: forward passes and the rest of steps; before steps, proposers and delays for drafts.",
        ("part",),
        {
            ("forward",): stats.forward,
            ("rest",): stats.busy - stats.forward,
            ("propose",): stats.proposing,
            ("delay",): stats.delayed,
        },
    )
    found.histogram(
        "request_queue_time_seconds", "Seconds that a new session has waited for KV memory.", stats.queue_seconds
    )

    lengths = stats.accepted_lengths
    modes: dict[tuple[str, ...], float] = {(mode.value,): mode.value == stats.mode for mode in Mode}
    found.gauges(
        "speculation_mode", "1 for the mode that adaptive speculation has chosen last, else 0.", ("mode",), modes
    )
    found.counter("spec_decode_num_drafts", "Steps of sessions that had candidates.", sum(lengths))
    found.counter("spec_decode_num_draft_tokens", "Candidates verified.", told.offered_candidates)
    found.counter("spec_decode_num_accepted_tokens", "Candidates accepted.", told.accepted_candidates)
    found.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Candidates accepted, by their place after the committed text, from 0 to 15.",
        ("position",),
        {(str(place),): sum(lengths[place + 1 :]) for place in range(len(lengths) - 1)},
    )
    found.counter("drafted_steps", "Steps of sessions with a draft, after which the text goes on.", told.drafted_steps)
    found.counter("draft_ready_steps", "Steps of them with the next candidates already there.", told.draft_ready_steps)
    found.counter("refused_candidates", "Messages of candidates that made no sense.", told.refused_extends)
    found.gauge("fast_paths_off", "Fast paths that are off in this process.", len(told.fast_paths_off))
    return found.made
