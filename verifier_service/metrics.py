"""The metrics of a verifier."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from specdec.serving.metrics.families import Families
from specdec.v2 import verifier_pb2
from verifier_service.backend.result import Mode
from verifier_service.backend.stats import VerifierStats


def metrics(reported: verifier_pb2.GetStatsResponse, stats: VerifierStats) -> list[Metric]:
    """Return the metrics for a `GetStats` response and the verifier's own counters."""
    found = Families("verifier")
    found.process(reported.pod, reported.serving)
    found.gauge("num_sessions", "Open sessions.", reported.sessions)
    found.gauge("num_requests_running", "Sessions with KV memory.", reported.running)
    waiting = max(0, reported.waiting - reported.throttled)
    found.gauge("num_requests_waiting", "Sessions waiting for KV memory, throttled ones not included.", waiting)
    found.gauge(
        "num_requests_throttled",
        "Sessions without KV memory, throttled because their clients read slowly.",
        reported.throttled,
    )
    usage = reported.kv_held_tokens / reported.kv_tokens
    found.gauge("kv_cache_usage_perc", "KV cache usage by sessions, from 0 to 1.", usage)
    free = reported.kv_tokens - reported.kv_held_tokens - reported.kv_cached_tokens
    tokens: dict[tuple[str, ...], float] = {
        ("held",): reported.kv_held_tokens,
        ("cached",): reported.kv_cached_tokens,
        ("free",): free,
    }
    found.gauges("kv_cache_tokens", "Tokens of KV cache, by state.", ("state",), tokens)
    found.counter(
        "prompt_tokens",
        "Tokens of sessions at their first admission to KV memory, resumed ones included.",
        reported.prompt_tokens,
    )
    found.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", reported.prompt_tokens)
    found.counter("prefix_cache_hits", "Tokens found in the prefix cache.", reported.cached_tokens)
    found.counter("generation_tokens", "Tokens committed.", reported.committed_tokens)
    found.counter("num_preemptions", "Preemptions of sessions.", reported.preemptions)
    found.counter("step_rows", "Rows of all steps.", reported.rows)
    found.histogram("step_time_seconds", "Seconds of a step.", stats.step_seconds)
    found.counters(
        "step_part_seconds",
        "Seconds by part: forward passes, the rest of steps, proposers before steps, and step delays for drafts.",
        ("part",),
        {
            ("forward",): stats.forward,
            ("rest",): stats.busy - stats.forward,
            ("propose",): stats.proposing,
            ("delay",): stats.delayed,
        },
    )
    found.histogram(
        "request_queue_time_seconds",
        "Seconds from the opening of a session to its admission to KV memory.",
        stats.queue_seconds,
    )

    lengths = stats.accepted_lengths
    modes: dict[tuple[str, ...], float] = {(mode,): mode == stats.mode for mode in Mode}
    found.gauges(
        "speculation_mode",
        "1 for the mode of adaptive speculation in the last step, else 0; all 0 if it chose for no text.",
        ("mode",),
        modes,
    )
    found.counter(
        "spec_decode_num_drafts",
        "Steps of sessions with candidates (a step with n such sessions counts n times).",
        sum(lengths),
    )
    found.counter("spec_decode_num_draft_tokens", "Candidates verified.", reported.offered_candidates)
    found.counter("spec_decode_num_accepted_tokens", "Candidates accepted.", reported.accepted_candidates)
    found.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Candidates accepted, by position after the committed text, 0 to 15.",
        ("position",),
        {(str(place),): sum(lengths[place + 1 :]) for place in range(len(lengths) - 1)},
    )
    found.counter(
        "drafted_steps",
        "Steps of sessions with a remote draft (a step with n such sessions counts n times), except a text's last.",
        reported.drafted_steps,
    )
    found.counter(
        "draft_ready_steps",
        "Drafted steps that ended with the next candidates already received.",
        reported.draft_ready_steps,
    )
    found.counter("refused_candidates", "Candidate messages refused as invalid.", reported.refused_extends)
    found.gauge("fast_paths_off", "Fast paths disabled in this process.", len(reported.fast_paths_off))
    return found.made
