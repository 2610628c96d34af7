"""The panels of the dashboard, row by row: what each shows, and the expressions behind it."""

from __future__ import annotations

from deploy.grafana.panel import JOB, Panel, by_role, quantiles, rate, share, total

ORCHESTRATOR, VERIFIER, DRAFT, OPENAI = "specdec_orchestrator", "specdec_verifier", "specdec_draft", "specdec_openai"

TRAFFIC = [
    Panel(
        "Requests",
        "reqps",
        {"came": rate(f"{ORCHESTRATOR}_requests_total"), "left": rate(f"{ORCHESTRATOR}_cancelled_requests_total")},
        "Requests that came, those included that come again after a refusal; and those whose callers left.",
    ),
    Panel(
        "Failed requests, by reason",
        "reqps",
        {"{{reason}}": rate(f"{ORCHESTRATOR}_failed_requests_total", "reason")},
        "OVERLOADED and TOO_LATE are load; INVALID_REQUEST, TENANT_LIMIT and the like callers'; others ours.",
    ),
    Panel(
        "Requests, by the class of their tenants",
        "reqps",
        {
            "{{tenant_class}}": rate(f"{ORCHESTRATOR}_requests_total", "tenant_class"),
            "{{tenant_class}}, failed": rate(f"{ORCHESTRATOR}_failed_requests_total", "tenant_class"),
        },
        "Refused ones are among those that failed.",
    ),
    Panel(
        "Texts under way",
        "short",
        {
            "requests": total(f"{ORCHESTRATOR}_num_requests_running"),
            "samples": total(f"{ORCHESTRATOR}_num_samples_running"),
            "prompts to be tokenised": total(f"{ORCHESTRATOR}_num_prompts_waiting"),
        },
        "A request has n samples.",
    ),
    Panel(
        "Tokens a second",
        "short",
        {
            "committed, as they come": rate(f"{VERIFIER}_generation_tokens_total"),
            "generated, as texts end": rate(f"{ORCHESTRATOR}_generation_tokens_total"),
            "goodput": rate(f"{ORCHESTRATOR}_goodput_tokens_total"),
            "prompts": rate(f"{ORCHESTRATOR}_prompt_tokens_total"),
        },
        "Goodput: tokens of texts that were complete before their deadlines.",
    ),
    Panel(
        "Complete texts, by why they are",
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
        "From a tokenised prompt to its first token: queue, prefill, one step.",
    ),
    Panel(
        "Time between tokens",
        "s",
        quantiles(f"{ORCHESTRATOR}_inter_token_latency_seconds", 0.5, 0.95, 0.99),
        "Tokens that came together share their time.",
    ),
    Panel(
        "Whole samples",
        "s",
        quantiles(f"{ORCHESTRATOR}_e2e_request_latency_seconds", 0.5, 0.95),
        "From a tokenised prompt to the end of a sample.",
    ),
    Panel(
        "Queue for KV memory",
        "s",
        quantiles(f"{VERIFIER}_request_queue_time_seconds", 0.5, 0.95),
        "What new sessions wait at a verifier before they have memory.",
    ),
]

SPECULATION = [
    Panel(
        "Mode",
        "percentunit",
        {"{{mode}}": f"avg by (mode) (avg_over_time({VERIFIER}_speculation_mode{JOB}[$__rate_interval]))"},
        "Share of looks at which adaptive speculation had chosen a mode; short probes of other modes are usual.",
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
        "One more is vLLM's mean acceptance length.",
    ),
    Panel(
        "Accepted candidates, by place",
        "percentunit",
        {
            "{{position}}": rate(f"{VERIFIER}_spec_decode_num_accepted_tokens_per_pos_total", "position")
            + f" / on () group_left () {rate(f'{VERIFIER}_spec_decode_num_drafts_total')}"
        },
        "Share of drafted steps in which the candidate at this place was accepted.",
    ),
    Panel(
        "Drafts in time",
        "percentunit",
        {"ready": share(f"{VERIFIER}_draft_ready_steps_total", f"{VERIFIER}_drafted_steps_total")},
        "Share of drafted steps that ended with the next candidates already there.",
    ),
    Panel(
        "Texts without the draft that they want, by reason",
        "short",
        {"{{reason}}": rate(f"{ORCHESTRATOR}_fallback_seconds_total", "reason")},
        "Seconds a second, that is texts at a time.",
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
        "Messages of sessions, prompts included, between the orchestrators and each role.",
    ),
]

VERIFIERS = [
    Panel(
        "Step time",
        "s",
        quantiles(f"{VERIFIER}_step_time_seconds", 0.5, 0.95),
        "Seconds of a step, over all verifiers. A few very long ones show in the mean beside this.",
    ),
    Panel(
        "Mean step time, by pod",
        "s",
        {"{{instance}}": share(f"{VERIFIER}_step_time_seconds_sum", f"{VERIFIER}_step_time_seconds_count", "instance")},
        "Seconds of a step: whether one verifier is slow, or all of them.",
    ),
    Panel(
        "Where the time goes",
        "percentunit",
        {"{{part}}": f"avg by (part) (rate({VERIFIER}_step_part_seconds_total{JOB}[$__rate_interval]))"},
        "Share of a verifier's time: forward passes and the rest of steps; before them, proposers and delays.",
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
        "Part of the KV cache that sessions hold.",
    ),
    Panel(
        "KV cache of verifiers, by use",
        "short",
        {"{{state}}": total(f"{VERIFIER}_kv_cache_tokens", "state")},
        "Tokens: held by sessions, cached for prompts that begin alike, free.",
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
        "Waiting: for KV memory. Throttled ones among them are far ahead of their readers.",
    ),
    Panel(
        "Preemptions",
        "short",
        {"{{instance}}": rate(f"{VERIFIER}_num_preemptions_total", "instance")},
        "Times a second that a session loses its KV memory to others.",
    ),
    Panel(
        "Prompts found in the KV cache",
        "percentunit",
        {"tokens": share(f"{VERIFIER}_prefix_cache_hits_total", f"{VERIFIER}_prefix_cache_queries_total")},
        "Share of the prompts' tokens that need no prefill.",
    ),
]

DRAFTS = [
    Panel(
        "Busy",
        "percentunit",
        {"{{instance}}": rate(f"{DRAFT}_busy_seconds_total", "instance")},
        "Share of the time spent in steps.",
    ),
    Panel(
        "Guessed tokens",
        "percentunit",
        {"of those committed": share(f"{DRAFT}_guessed_tokens_total", f"{DRAFT}_committed_tokens_total")},
        "Share of the final tokens that the draft had among its candidates.",
    ),
    Panel(
        "Sent",
        "short",
        {"candidates": rate(f"{DRAFT}_sent_candidates_total"), "messages": rate(f"{DRAFT}_sent_messages_total")},
        "Candidates and messages of them a second.",
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
        "Seconds of a forward pass. A draft that lacks processor time takes longer, and is no busier than before.",
    ),
    Panel(
        "Sessions of drafts",
        "short",
        {"{{instance}}": f"{DRAFT}_num_sessions{JOB}"},
        "Texts that a draft pod has open.",
    ),
    Panel(
        "KV cache of drafts",
        "percentunit",
        {"{{instance}}": f"{DRAFT}_kv_cache_usage_perc{JOB}"},
        "Part of the KV cache that sessions hold.",
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
            "orchestrators that reach a verifier": f"{total(f'{ORCHESTRATOR}_verifier_reachable')} or vector(0)",
        },
        "Pods that take calls, of those that answer scrapes.",
    ),
    Panel(
        "Scrapes that succeed",
        "percentunit",
        {"{{instance}}": f"avg_over_time(up{JOB}[$__rate_interval])"},
        "0: gone or stuck. In between: it stands still now and then, or its network does.",
    ),
    Panel(
        "Pods as orchestrators see them",
        "short",
        {"{{role}} {{state}}": total(f"{ORCHESTRATOR}_pods", "role, state")},
        "By the state of their circuit breakers, summed over orchestrators: open ones are left alone, then tried again "
        "(half_open). Where trials are refused at once the state is mostly open; where they hang, often half_open.",
    ),
    Panel(
        "Sessions of orchestrators at pods",
        "short",
        {"{{role}} {{pod}}": total(f"{ORCHESTRATOR}_pod_sessions", "role, pod")},
        "How texts are spread over pods.",
    ),
    Panel(
        "Failover events, by reason",
        "short",
        {"{{reason}}": rate(f"{ORCHESTRATOR}_failover_events_total", "reason")},
        "Events a second. draft_paused and draft_resumed are adaptive speculation at work.",
    ),
    Panel(
        "Candidates that made no sense",
        "short",
        {"{{instance}}": rate(f"{VERIFIER}_refused_candidates_total", "instance")},
        "Messages a second that verifiers refuse.",
    ),
    Panel(
        "Fast paths that are off",
        "short",
        {
            "verifier {{instance}}": f"{VERIFIER}_fast_paths_off{JOB}",
            "draft {{instance}}": f"{DRAFT}_fast_paths_off{JOB}",
        },
        "The log of the start says which, and what it costs.",
    ),
    Panel(
        "Files that cannot be used",
        "short",
        {
            "{{instance}} {{what}}": f"{ORCHESTRATOR}_files_refused{JOB} or {VERIFIER}_files_refused{JOB} "
            f"or {DRAFT}_files_refused{JOB} or {OPENAI}_files_refused{JOB}"
        },
        "Files that a pod reads again when they change. It goes on with what it read before.",
    ),
    Panel(
        "Versions",
        "short",
        {
            "{{version}}": f"count by (version) ({ORCHESTRATOR}_build_info{JOB} or {VERIFIER}_build_info{JOB} "
            f"or {DRAFT}_build_info{JOB})"
        },
        "Pods of each version.",
    ),
    Panel(
        "Processor time",
        "short",
        by_role(f"rate(process_cpu_seconds_total{JOB}[$__rate_interval])"),
        "Cores in use. An orchestrator uses one at most; a pod that uses few while it is busy lacks cores.",
    ),
    Panel("Memory", "bytes", by_role(f"process_resident_memory_bytes{JOB}"), "Resident memory of processes."),
    Panel(
        "Since when",
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
        "What each revision of a model gets: its share, and what names it.",
    ),
    Panel(
        "Failed requests, by revision",
        "percentunit",
        {
            "{{model_name}} {{revision}}": share(
                f"{ORCHESTRATOR}_failed_requests_total", f"{ORCHESTRATOR}_requests_total", "model_name, revision"
            )
        },
        "Part of the requests that fail, callers' mistakes included.",
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
        "The mean.",
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
        "The mean.",
    ),
    Panel(
        "Shares",
        "percentunit",
        {"{{model_name}} {{revision}}": f"avg by (model_name, revision) ({ORCHESTRATOR}_revision_share{JOB})"},
        "Part of its model's requests that each revision is to get; orchestrators that differ read different files.",
    ),
]

ROWS = {
    "Traffic": TRAFFIC,
    "Latency": LATENCY,
    "Speculation": SPECULATION,
    "Verifiers": VERIFIERS,
    "Drafts": DRAFTS,
    "Failures": FAILURES,
    "Revisions": REVISIONS,
}
