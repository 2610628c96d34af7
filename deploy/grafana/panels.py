"""The panels of the dashboard, row by row: what each shows, and the expressions behind it."""

from __future__ import annotations

from deploy.grafana.panel import JOB, Panel, by_role, quantiles, rate, share, total

ORCHESTRATOR, VERIFIER, DRAFT, OPENAI = "specdec_orchestrator", "specdec_verifier", "specdec_draft", "specdec_openai"

TRAFFIC = [
    Panel(
        "Requests",
        "reqps",
        {
            "received": rate(f"{ORCHESTRATOR}_requests_total"),
            "cancelled": rate(f"{ORCHESTRATOR}_cancelled_requests_total"),
        },
        "Requests received, retries after a refusal included, and requests cancelled by their callers.",
    ),
    Panel(
        "Failed requests, by reason",
        "reqps",
        {"{{reason}}": rate(f"{ORCHESTRATOR}_failed_requests_total", "reason")},
        "OVERLOADED, TOO_LATE: load. INVALID_REQUEST, TENANT_LIMIT and the like: caller errors. Others: server errors.",
    ),
    Panel(
        "Requests, by tenant class",
        "reqps",
        {
            "{{tenant_class}}": rate(f"{ORCHESTRATOR}_requests_total", "tenant_class"),
            "{{tenant_class}}, failed": rate(f"{ORCHESTRATOR}_failed_requests_total", "tenant_class"),
        },
        "Failed requests include refused ones.",
    ),
    Panel(
        "Texts in flight",
        "short",
        {
            "requests": total(f"{ORCHESTRATOR}_num_requests_running"),
            "samples": total(f"{ORCHESTRATOR}_num_samples_running"),
            "prompts waiting for tokenisation": total(f"{ORCHESTRATOR}_num_prompts_waiting"),
        },
        "A request has n samples.",
    ),
    Panel(
        "Tokens a second",
        "short",
        {
            "committed, per step": rate(f"{VERIFIER}_generation_tokens_total"),
            "generated, counted at the end of texts": rate(f"{ORCHESTRATOR}_generation_tokens_total"),
            "goodput": rate(f"{ORCHESTRATOR}_goodput_tokens_total"),
            "prompts": rate(f"{ORCHESTRATOR}_prompt_tokens_total"),
        },
        "Goodput: tokens of texts completed before their deadline.",
    ),
    Panel(
        "Completed texts, by finish reason",
        "reqps",
        {"{{finished_reason}}": rate(f"{ORCHESTRATOR}_request_success_total", "finished_reason")},
        "stop: an end token or a stop string; length: max_tokens; context: the model's limit.",
    ),
]

LATENCY = [
    Panel(
        "Time to first token",
        "s",
        quantiles(f"{ORCHESTRATOR}_time_to_first_token_seconds", 0.5, 0.95, 0.99),
        "From the tokenised prompt to the first token: queue, prefill, one step.",
    ),
    Panel(
        "Time between tokens",
        "s",
        quantiles(f"{ORCHESTRATOR}_inter_token_latency_seconds", 0.5, 0.95, 0.99),
        "Tokens that arrive together share the interval equally.",
    ),
    Panel(
        "Whole samples",
        "s",
        quantiles(f"{ORCHESTRATOR}_e2e_request_latency_seconds", 0.5, 0.95),
        "From the tokenised prompt to the end of the sample.",
    ),
    Panel(
        "Queue for KV memory",
        "s",
        quantiles(f"{VERIFIER}_request_queue_time_seconds", 0.5, 0.95),
        "Time that new sessions wait for KV memory at a verifier.",
    ),
]

HTTP = [
    Panel(
        "HTTP requests, by status",
        "reqps",
        {"{{status}}": rate(f"{OPENAI}_requests_total", "status")},
        "429: a caller at its limit. 499: the caller left before the answer. 503: no capacity or no orchestrator.",
    ),
    Panel(
        "HTTP requests in flight",
        "short",
        {"{{instance}}": f"{OPENAI}_requests_running{JOB}"},
        "Requests received and not yet answered, by server.",
    ),
    Panel(
        "Time to first byte by HTTP",
        "s",
        quantiles(f"{OPENAI}_time_to_first_byte_seconds", 0.5, 0.95, 0.99),
        "From the request to the first part of the answer; of a stream, its first tokens.",
    ),
    Panel(
        "Whole HTTP requests",
        "s",
        quantiles(f"{OPENAI}_request_seconds", 0.5, 0.95),
        "From the request to the end of the answer.",
    ),
]

SPECULATION = [
    Panel(
        "Mode",
        "percentunit",
        {"{{mode}}": f"avg by (mode) (avg_over_time({VERIFIER}_speculation_mode{JOB}[$__rate_interval]))"},
        "Share of scrapes in each mode of adaptive speculation; short probes of other modes are normal.",
    ),
    Panel(
        "Accepted candidates",
        "percentunit",
        {
            "of those verified": share(
                f"{VERIFIER}_spec_decode_num_accepted_tokens_total", f"{VERIFIER}_spec_decode_num_draft_tokens_total"
            )
        },
        "Acceptance: accepted candidates divided by candidates verified.",
    ),
    Panel(
        "Accepted candidates a drafted step",
        "short",
        {
            "mean": share(
                f"{VERIFIER}_spec_decode_num_accepted_tokens_total", f"{VERIFIER}_spec_decode_num_drafts_total"
            )
        },
        "vLLM's mean acceptance length is this plus one.",
    ),
    Panel(
        "Accepted candidates, by position",
        "percentunit",
        {
            "{{position}}": rate(f"{VERIFIER}_spec_decode_num_accepted_tokens_per_pos_total", "position")
            + f" / on () group_left () {rate(f'{VERIFIER}_spec_decode_num_drafts_total')}"
        },
        "Share of drafted steps that accepted the candidate at this position.",
    ),
    Panel(
        "Drafts in time",
        "percentunit",
        {"ready": share(f"{VERIFIER}_draft_ready_steps_total", f"{VERIFIER}_drafted_steps_total")},
        "Share of drafted steps that ended with the next candidates already received.",
    ),
    Panel(
        "Texts without their draft, by reason",
        "short",
        {"{{reason}}": rate(f"{ORCHESTRATOR}_fallback_seconds_total", "reason")},
        "Seconds per second: the number of such texts.",
    ),
    Panel(
        "Bytes between services for each committed token",
        "bytes",
        {
            "verifier": f"({rate(f'{VERIFIER}_session_sent_bytes_total')} "
            f"+ {rate(f'{VERIFIER}_session_received_bytes_total')}) / {rate(f'{VERIFIER}_generation_tokens_total')}",
            "draft": f"({rate(f'{DRAFT}_session_sent_bytes_total')} "
            f"+ {rate(f'{DRAFT}_session_received_bytes_total')}) / {rate(f'{VERIFIER}_generation_tokens_total')}",
        },
        "Session messages, prompts included, between the orchestrators and each role.",
    ),
]

VERIFIERS = [
    Panel(
        "Step time",
        "s",
        quantiles(f"{VERIFIER}_step_time_seconds", 0.5, 0.95),
        "Step time over all verifiers. A few very long steps show in the mean, in the next panel.",
    ),
    Panel(
        "Mean step time, by pod",
        "s",
        {"{{instance}}": share(f"{VERIFIER}_step_time_seconds_sum", f"{VERIFIER}_step_time_seconds_count", "instance")},
        "Whether one verifier is slow, or all of them.",
    ),
    Panel(
        "Where the time goes",
        "percentunit",
        {"{{part}}": f"avg by (part) (rate({VERIFIER}_step_part_seconds_total{JOB}[$__rate_interval]))"},
        "Share of a verifier's time: forward passes, the rest of steps, proposers before steps, and step delays.",
    ),
    Panel(
        "Rows a step",
        "short",
        {"mean": share(f"{VERIFIER}_step_rows_total", f"{VERIFIER}_step_time_seconds_count")},
        "Rows are tokens of a forward pass: roots, candidates, prompts.",
    ),
    Panel(
        "KV cache of verifiers",
        "percentunit",
        {"{{instance}}": f"{VERIFIER}_kv_cache_usage_perc{JOB}"},
        "KV cache usage by sessions.",
    ),
    Panel(
        "KV cache of verifiers, by use",
        "short",
        {"{{state}}": total(f"{VERIFIER}_kv_cache_tokens", "state")},
        "Tokens: held by sessions, prefix cache, free.",
    ),
    Panel(
        "Sessions of verifiers",
        "short",
        {
            "open": total(f"{VERIFIER}_num_sessions"),
            "running": total(f"{VERIFIER}_num_requests_running"),
            "waiting": total(f"{VERIFIER}_num_requests_waiting"),
            "throttled": total(f"{VERIFIER}_num_requests_throttled"),
        },
        "Waiting: for KV memory. Throttled: without KV memory, since their clients read slowly.",
    ),
    Panel(
        "Preemptions",
        "short",
        {"{{instance}}": rate(f"{VERIFIER}_num_preemptions_total", "instance")},
        "Preemptions per second.",
    ),
    Panel(
        "Prefix cache hit rate",
        "percentunit",
        {"tokens": share(f"{VERIFIER}_prefix_cache_hits_total", f"{VERIFIER}_prefix_cache_queries_total")},
        "Share of prompt tokens that need no prefill.",
    ),
]

DRAFTS = [
    Panel(
        "Busy",
        "percentunit",
        {"{{instance}}": rate(f"{DRAFT}_busy_seconds_total", "instance")},
        "Share of time spent in steps.",
    ),
    Panel(
        "Guessed tokens",
        "percentunit",
        {"of those committed": share(f"{DRAFT}_guessed_tokens_total", f"{DRAFT}_committed_tokens_total")},
        "Share of committed tokens that were in the draft's token tree.",
    ),
    Panel(
        "Sent",
        "short",
        {"candidates": rate(f"{DRAFT}_sent_candidates_total"), "messages": rate(f"{DRAFT}_sent_messages_total")},
        "Candidates, and messages of candidates, per second.",
    ),
    Panel(
        "Steps a second",
        "short",
        {"{{instance}}": rate(f"{DRAFT}_steps_total", "instance")},
        "Forward passes of the draft.",
    ),
    Panel(
        "Mean step time of drafts, by pod",
        "s",
        {"{{instance}}": share(f"{DRAFT}_busy_seconds_total", f"{DRAFT}_steps_total", "instance")},
        "Seconds of a forward pass. It grows when a draft lacks CPU time, while its busy share does not.",
    ),
    Panel(
        "Sessions of drafts",
        "short",
        {"{{instance}}": f"{DRAFT}_num_sessions{JOB}"},
        "Open sessions of each draft pod.",
    ),
    Panel(
        "KV cache of drafts",
        "percentunit",
        {"{{instance}}": f"{DRAFT}_kv_cache_usage_perc{JOB}"},
        "KV cache usage by sessions.",
    ),
    Panel(
        "Versions of drafts, by state",
        "short",
        {"{{version}} {{state}}": f"count by (version, state) ({DRAFT}_version_state{JOB})"},
        "Draft pods that have a version in this state. Nothing without --versions.",
    ),
    Panel(
        "Outcomes of versions",
        "short",
        {"{{outcome}}": f"sum by (outcome) (increase({DRAFT}_version_outcomes_total{JOB}[$__rate_interval]))"},
        "Promotions, rollbacks and refusals.",
    ),
    Panel(
        "Guessed tokens, by version",
        "percentunit",
        {
            "{{version}}": share(
                f"{DRAFT}_version_guessed_tokens_total", f"{DRAFT}_version_committed_tokens_total", "version"
            )
        },
        "Share of the committed tokens in a version's sessions that were in its token tree.",
    ),
    Panel(
        "Sessions of drafts, by version",
        "short",
        {"{{version}}": total(f"{DRAFT}_version_sessions", "version")},
        "Open sessions of each version.",
    ),
    Panel(
        "Mean time of a draft's pass, by version",
        "s",
        {"{{version}}": share(f"{DRAFT}_version_busy_seconds_total", f"{DRAFT}_version_passes_total", "version")},
        "Seconds of a forward pass, with the choice of children.",
    ),
    Panel(
        "Kept to learn from",
        "short",
        {"{{instance}} texts": f"{DRAFT}_kept_texts{JOB}", "{{instance}} tokens": f"{DRAFT}_kept_tokens{JOB}"},
        "Texts that drafts keep, with permission. Nothing without --learn-tokens.",
    ),
    Panel(
        "Age of what is kept to learn from",
        "s",
        {"{{instance}}": f"{DRAFT}_kept_age_seconds{JOB}"},
        "Age of the oldest kept text.",
    ),
    Panel(
        "Log-probabilities kept to learn from",
        "bytes",
        {"{{instance}}": f"{DRAFT}_kept_logprob_bytes{JOB}"},
        "Bytes of the target's log-probabilities, within --learn-logprobs-mb.",
    ),
]

FAILURES = [
    Panel(
        "Serving",
        "short",
        {
            "orchestrators": f"{total(f'{ORCHESTRATOR}_serving')} or vector(0)",
            "verifiers": f"{total(f'{VERIFIER}_serving')} or vector(0)",
            "drafts": f"{total(f'{DRAFT}_serving')} or vector(0)",
            "orchestrators that reach a verifier": (
                f"sum(max by (job, instance) ({ORCHESTRATOR}_verifier_reachable{JOB})) or vector(0)"
            ),
        },
        "SERVING pods, of those that answer scrapes.",
    ),
    Panel(
        "Scrapes that succeed",
        "percentunit",
        {"{{instance}}": 'avg_over_time(up{job=~"$job", job=~"specdec.*"}[$__rate_interval])'},
        "0: gone or stuck. Between 0 and 1: the pod or its network stalls at times.",
    ),
    Panel(
        "Pods as orchestrators see them",
        "short",
        {"{{role}} {{state}}": total(f"{ORCHESTRATOR}_pods", "role, state")},
        "By circuit breaker state, summed over orchestrators: open pods are avoided, then retried (half_open). If "
        "retries fail immediately, the pod is mostly open; if they hang, it is often half_open.",
    ),
    Panel(
        "Sessions of orchestrators at pods",
        "short",
        {"{{role}} {{address}}": total(f"{ORCHESTRATOR}_pod_sessions", "role, address")},
        "Open sessions at each pod, summed over orchestrators.",
    ),
    Panel(
        "Failover events, by reason",
        "short",
        {"{{reason}}": rate(f"{ORCHESTRATOR}_failover_events_total", "reason")},
        "Events per second. draft_paused and draft_resumed come from adaptive speculation.",
    ),
    Panel(
        "Invalid candidates",
        "short",
        {"{{instance}}": rate(f"{VERIFIER}_refused_candidates_total", "instance")},
        "Messages per second refused by verifiers.",
    ),
    Panel(
        "Refused calls",
        "short",
        {
            f"{service.removeprefix('specdec_')} {{{{reason}}}}": rate(f"{service}_refused_calls_total", "reason")
            for service in (ORCHESTRATOR, VERIFIER, DRAFT)
        },
        "Per second, refused before their requests were read: missing or unknown keys, wrong certificates.",
    ),
    Panel(
        "Disabled fast paths",
        "short",
        {
            "verifier {{instance}}": f"{VERIFIER}_fast_paths_off{JOB}",
            "draft {{instance}}": f"{DRAFT}_fast_paths_off{JOB}",
        },
        "The start-up log names them, and their cost.",
    ),
    Panel(
        "Rejected files",
        "short",
        {
            "{{instance}} {{what}}": f"{ORCHESTRATOR}_files_refused{JOB} or {VERIFIER}_files_refused{JOB} "
            f"or {DRAFT}_files_refused{JOB} or {OPENAI}_files_refused{JOB}"
        },
        "Watched files that failed to reload. The pod keeps the previous contents.",
    ),
    Panel(
        "Versions",
        "short",
        {
            "{{version}}": f"count by (version) ({ORCHESTRATOR}_build_info{JOB} or {VERIFIER}_build_info{JOB} "
            f"or {DRAFT}_build_info{JOB})"
        },
        "Pods by version.",
    ),
    Panel(
        "Processor time",
        "short",
        by_role(f"rate(process_cpu_seconds_total{JOB}[$__rate_interval])"),
        "Cores in use. An orchestrator uses at most one; a busy pod with low usage lacks cores.",
    ),
    Panel("Memory", "bytes", by_role(f"process_resident_memory_bytes{JOB}"), "Resident memory of processes."),
    Panel(
        "Uptime",
        "s",
        by_role(f"(time() - process_start_time_seconds{JOB})"),
        "Seconds since the start of each process.",
    ),
]

REVISIONS = [
    Panel(
        "Requests, by revision",
        "reqps",
        {"{{model_name}} {{revision}}": rate(f"{ORCHESTRATOR}_requests_total", "model_name, revision")},
        "Requests of each revision: its share, and requests that name it.",
    ),
    Panel(
        "Failed requests, by revision",
        "percentunit",
        {
            "{{model_name}} {{revision}}": share(
                f"{ORCHESTRATOR}_failed_requests_total", f"{ORCHESTRATOR}_requests_total", "model_name, revision"
            )
        },
        "Share of failed requests, caller errors included.",
    ),
    Panel(
        "Time between tokens, by revision",
        "s",
        {
            "{{model_name}} {{revision}}": share(
                f"{ORCHESTRATOR}_inter_token_latency_seconds_sum",
                f"{ORCHESTRATOR}_inter_token_latency_seconds_count",
                "model_name, revision",
            )
        },
        "Mean.",
    ),
    Panel(
        "Time to first token, by revision",
        "s",
        {
            "{{model_name}} {{revision}}": share(
                f"{ORCHESTRATOR}_time_to_first_token_seconds_sum",
                f"{ORCHESTRATOR}_time_to_first_token_seconds_count",
                "model_name, revision",
            )
        },
        "Mean.",
    ),
    Panel(
        "Shares",
        "percentunit",
        {"{{model_name}} {{revision}}": f"avg by (model_name, revision) ({ORCHESTRATOR}_revision_share{JOB})"},
        "Configured share of a model's requests for each revision. Orchestrators that differ have read different "
        "files.",
    ),
]

ROWS = {
    "Traffic": TRAFFIC,
    "Latency": LATENCY,
    "HTTP": HTTP,
    "Speculation": SPECULATION,
    "Verifiers": VERIFIERS,
    "Drafts": DRAFTS,
    "Failures": FAILURES,
    "Revisions": REVISIONS,
}
