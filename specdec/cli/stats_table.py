"""A service's statistics as a table for people: one line per subject, starting with its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from specdec.cli.pod_stats import PodStats, Stats
from specdec.v2.draft_pb2 import DraftServiceGetStatsResponse, DraftVersion, DraftVersionState
from specdec.v2.generation_pb2 import BreakerState, GenerationServiceGetStatsResponse, PodView, RevisionView
from specdec.v2.model_pb2 import NUMERICS_MODE_EXACT, ModelIdentity, PodInfo, SpeculationDecisions
from specdec.v2.verifier_pb2 import GetStatsResponse
from specdec.wire.decisions import DRAFTING_EVENTS, MEASURED, MODES, explained, proposed

WIDTH = 13
"""Characters of the column of names."""

FINGERPRINT = 12
"""Characters of a fingerprint to show."""

Line = tuple[str, str]


def table(address: str, seen: PodStats, before: PodStats | None) -> Iterator[str]:
    """Yield the lines of a snapshot; rates are relative to the snapshot `before`, if given."""
    yield f"{seen.role} at {address}"
    for name, text in subjects(seen, before):
        yield f"  {name:{WIDTH}}{text}".rstrip()


def grid(address: str, seen: PodStats, before: PodStats | None) -> Table:
    """Return the snapshot as a table for a terminal: a long text wraps between words, aligned with its start."""
    shown = Table.grid(padding=(0, 1))
    shown.title, shown.title_justify = Text(printable(f"{seen.role} at {address}")), "left"
    shown.add_column(min_width=WIDTH, no_wrap=True, style="dim")
    shown.add_column(overflow="fold")
    for name, text in subjects(seen, before):
        shown.add_row(Text(f"  {name}"), Text(text))
    return shown


def subjects(seen: PodStats, before: PodStats | None) -> Iterator[Line]:
    """Yield (name, text) for each subject of a snapshot."""
    stats = seen.stats
    # Only compare snapshots of the same process: after a restart, counters start from 0.
    earlier = before.stats if before and seen.is_same_process(before) else None
    lines: Iterator[Line]
    if now := _now(stats, earlier):
        yield "now", now
    if isinstance(stats, GenerationServiceGetStatsResponse):
        lines = _of_orchestrator(stats, earlier)
    elif isinstance(stats, GetStatsResponse):
        lines = _of_verifier(stats, earlier)
    else:
        lines = _of_draft(stats, earlier)
    for name, text in lines:
        yield name, printable(text)


# --- common to all services -------------------------------------------------------------------------


def _process(stats: Stats) -> Iterator[Line]:
    pod = stats.pod
    yield "process", f"{pod.process_id}, specdec {pod.version}, up {span(stats.up_us / 1e6)}"
    yield "state", "serving" if stats.serving else "not serving"


def _computing(identity: ModelIdentity, pod: PodInfo) -> Iterator[Line]:
    yield (
        "model",
        f"{identity.model}, fingerprint {identity.model_fingerprint[:FINGERPRINT] or 'unknown'}, "
        f"{identity.context_tokens} tokens of context, {identity.vocabulary_size} token ids",
    )
    threads = " or ".join(map(str, pod.threads))
    where = [f"on {pod.device} in {pod.dtype}"] if pod.device else []
    where += [f"with {threads} thread{'s' * (threads != '1')}"] if threads else []
    where.append("exact" if identity.numerics_mode == NUMERICS_MODE_EXACT else "not exact")
    yield "computes", ", ".join(where)
    yield "numerics", identity.numerics_fingerprint


def _memory(held: int, cached: int | None, tokens: int) -> Line:
    parts = f"{percent(held, tokens)} held" + ("" if cached is None else f", {percent(cached, tokens)} cached")
    return "KV memory", f"{tokens} tokens, {parts}" if tokens else "none"


def _off(fast_paths: Sequence[str]) -> Iterator[Line]:
    """Yield the disabled fast paths."""
    for number, line in enumerate(fast_paths):
        yield "" if number else "fast paths", line


def _candidates(offered: int, accepted: int, sources: Mapping[str, int]) -> str:
    by = proposed(sources)
    return f"{offered} verified, {accepted} accepted ({percent(accepted, offered)})" + (f": {by}" if by else "")


def _speculation(mode: str, decisions: SpeculationDecisions) -> Iterator[Line]:
    """Yield the current mode, if known, and the decisions about candidates so far."""
    why = explained(decisions)
    now = f"now {MODES.get(mode, mode)}" if mode else ""
    if now or why:
        yield "speculation", "; ".join(filter(None, (now, why and f"so far {why}")))
    if decisions.mode_rates and MEASURED.isdisjoint(decisions.without):
        rates = ", ".join(f"{MODES.get(mode, mode)} {rate:.0f}" for mode, rate in sorted(decisions.mode_rates.items()))
        yield "", f"tokens/s by mode, as last measured: {rates}"


# --- one service each -------------------------------------------------------------------------------


def _of_verifier(stats: GetStatsResponse, before: Stats | None) -> Iterator[Line]:
    yield from _process(stats)
    yield from _computing(stats.identity, stats.pod)
    waiting = f"{stats.waiting} waiting (at most {stats.max_waiting} new ones)"
    throttled = f", {stats.throttled} of them throttled" if stats.throttled else ""
    yield (
        "sessions",
        f"{stats.sessions} open (at most {stats.max_sessions}): {stats.running} running, {waiting}{throttled}",
    )
    yield _memory(stats.kv_held_tokens, stats.kv_cached_tokens, stats.kv_tokens)
    yield "steps", f"{stats.steps} of {_mean(stats.rows, stats.steps)} rows each; {_busy(stats, before)}"
    yield "tokens", f"{stats.committed_tokens} committed{_rate(stats, before, 'committed_tokens')}"
    yield (
        "prompts",
        f"{stats.prompt_tokens} tokens, {percent(stats.cached_tokens, stats.prompt_tokens)} cached",
    )
    refused = f"; {stats.refused_extends} messages refused" if stats.refused_extends else ""
    yield "candidates", _candidates(stats.offered_candidates, stats.accepted_candidates, stats.sources) + refused
    yield from _speculation(stats.mode, stats.decisions)
    if stats.drafted_steps:
        yield "drafts", f"in time for {percent(stats.draft_ready_steps, stats.drafted_steps)} of their sessions' steps"
    yield "preemptions", str(stats.preemptions)
    yield from _off(stats.fast_paths_off)


def _of_draft(stats: DraftServiceGetStatsResponse, before: Stats | None) -> Iterator[Line]:
    yield from _process(stats)
    yield from _computing(stats.identity, stats.pod)
    yield "sessions", f"{stats.sessions} open (at most {stats.max_sessions})"
    yield _memory(stats.kv_held_tokens, None, stats.kv_tokens)
    yield "steps", f"{stats.steps}; {_busy(stats, before)}"
    yield (
        "candidates",
        f"{stats.sent_candidates} sent in {stats.sent_messages} messages{_rate(stats, before, 'sent_candidates')}",
    )
    guessed = percent(stats.guessed_tokens, stats.committed_tokens)
    yield "tokens", f"{stats.committed_tokens} committed, {guessed} guessed before"
    if stats.kept_texts:
        minutes = round(stats.kept_age_us / 6e7)
        age = f"{minutes} minute{'s' * (minutes != 1)}"
        logprobs = f", {stats.kept_logprob_bytes / 1e6:.1f} MB of log-probabilities" if stats.kept_logprob_bytes else ""
        yield (
            "kept texts",
            f"{stats.kept_texts}, {stats.kept_tokens} tokens, the oldest for {age}{logprobs}",
        )
    for number, version in enumerate(stats.versions):
        yield "" if number else "versions", _version(version)
    yield from _off(stats.fast_paths_off)


def _version(version: DraftVersion) -> str:
    """Return a version of a draft's model in words: its state and, if it has drafted, its figures."""
    parts = [f"{version.name}  {_state(DraftVersionState, version.state, 'DRAFT_VERSION_STATE_')}"]
    if version.passes:
        guessed = percent(version.guessed_tokens, version.committed_tokens)
        parts.append(f"{version.sessions} sessions, {guessed} of {version.committed_tokens} tokens guessed")
        parts.append(f"{1e6 * version.passes / max(1, version.busy_us):.0f} passes a busy second")
    return ", ".join(parts) + (f": {version.reason}" if version.reason else "")


def _of_orchestrator(stats: GenerationServiceGetStatsResponse, before: Stats | None) -> Iterator[Line]:
    yield from _process(stats)
    for model in stats.models:
        chat = "chat template" if model.chat else "no chat template"
        yield (
            "model",
            f"{model.name}, {model.context_tokens} tokens of context, {model.vocabulary_size} token ids, {chat}",
        )
    yield from _revisions([view for view in stats.revisions if view.revision])
    yield (
        "requests",
        f"{stats.requests}: {stats.running_requests} running, {stats.cancelled_requests} cancelled, failed: "
        f"{_by_reason(stats.failed_requests)}",
    )
    if stats.waiting_prompts:
        yield "prompts", f"{stats.waiting_prompts} waiting for a tokeniser"
    yield "samples", f"{stats.running_samples} running, {stats.ended_samples} ended"
    yield (
        "tokens",
        f"{stats.generated_tokens} of ended samples{_rate(stats, before, 'generated_tokens')}, "
        f"{_mean(stats.generated_tokens, stats.steps)} a step; "
        f"{stats.prompt_tokens} of prompts, {stats.cached_tokens} cached",
    )
    yield "candidates", _candidates(stats.offered_candidates, stats.accepted_candidates, stats.sources)
    yield from _speculation("", stats.decisions)
    events = stats.failover_events
    yield "drafting", _by_reason({reason: events[reason] for reason in events.keys() & DRAFTING_EVENTS})
    yield "failover", _by_reason({reason: events[reason] for reason in events.keys() - DRAFTING_EVENTS})
    yield from _pods("verifiers", stats.verifiers)
    yield from _pods("drafts", stats.drafts)


def _revisions(revisions: Sequence[RevisionView]) -> Iterator[Line]:
    """Yield the named revisions, each with its share of its model's requests."""
    shares: defaultdict[str, float] = defaultdict(float)
    for view in revisions:
        shares[view.model] += 0.0 if view.leaving else view.share
    width = max((len(f"{view.model}@{view.revision}") for view in revisions), default=0)
    for number, view in enumerate(revisions):
        gets = "leaving" if view.leaving else f"{percent(view.share, shares[view.model])} of requests"
        state = "serving" if view.serving else "not serving"
        failed = f"failed: {_by_reason(view.failed_requests)}"
        yield (
            "" if number else "revisions",
            f"{view.model}@{view.revision:{width - len(view.model) - 1}}  {gets}, {state}, {view.requests} requests, "
            f"{view.running_requests} running, {failed}",
        )


def _pods(name: str, pods: Sequence[PodView]) -> Iterator[Line]:
    if not pods:
        yield name, "none"
        return
    width = max(len(pod.address) for pod in pods)
    for number, pod in enumerate(pods):
        serves = f"{pod.model}, " if pod.model else ""
        yield "" if number else name, f"{pod.address:{width}}  {serves}{_pod(pod)}"


def _pod(pod: PodView) -> str:
    breaker = _state(BreakerState, pod.breaker, "BREAKER_STATE_")
    parts = [f"breaker {breaker}", f"{pod.sessions} session{'s' * (pod.sessions != 1)} from here"]
    if pod.unfit_reason:
        parts.insert(0, f"unfit: {pod.unfit_reason}")
    if pod.HasField("capacity"):
        parts.append(f"{pod.capacity.sessions} in all, room for {pod.capacity.room} more")
    return ", ".join(parts)


def _state(states: Any, state: int, prefix: str) -> str:
    """Return a value of the enum `states` in words; "unknown" for one that only a newer server has."""
    if state not in states.values():
        return "unknown"
    return str(states.Name(state)).removeprefix(prefix).lower().replace("_", "-")


# --- numbers ----------------------------------------------------------------------------------------


class _Counts(NamedTuple):
    """The counters whose growth --watch shows."""

    tokens: int
    steps: int
    offered: int
    accepted: int


def _counts(stats: Stats) -> _Counts | None:
    match stats:
        case GenerationServiceGetStatsResponse(all_samples=counts):
            return _Counts(counts.tokens, counts.steps, counts.offered_candidates, counts.accepted_candidates)
        case GetStatsResponse():
            tokens, steps = stats.committed_tokens, stats.steps
            return _Counts(tokens, steps, stats.offered_candidates, stats.accepted_candidates)
    return None  # a draft commits nothing


def _now(stats: Stats, before: Stats | None) -> str:
    """Return tokens per second and per step, and acceptance, since the previous snapshot; empty without one."""
    new, old = _counts(stats), None if before is None else _counts(before)
    if before is None or new is None or old is None or stats.up_us <= before.up_us:
        return ""
    grown = _Counts(*(max(0, count - past) for count, past in zip(new, old, strict=True)))
    of_all = " of all sessions" if isinstance(stats, GetStatsResponse) else ""
    rate = grown.tokens / (stats.up_us - before.up_us) * 1e6
    parts = [f"{rate:.0f} tokens/s"]
    if grown.steps:
        parts.append(f"{grown.tokens / grown.steps:.2f} a step{of_all}")
        parts.append(f"{grown.accepted} of {grown.offered} candidates accepted")
    return ", ".join(parts) + (f" ({percent(grown.accepted, grown.offered)})" if grown.offered else "")


def _busy(stats: GetStatsResponse | DraftServiceGetStatsResponse, before: Stats | None) -> str:
    """Return the fraction of time spent in steps, since the previous snapshot or the start."""
    busy, up = stats.busy_us, stats.up_us
    if isinstance(before, GetStatsResponse | DraftServiceGetStatsResponse):
        return f"{percent(busy - before.busy_us, up - before.up_us)} busy"
    return f"{percent(busy, up)} busy since the start"


def _rate(stats: Stats, before: Stats | None, counter: str) -> str:
    """Return the rate of a counter since the previous snapshot; empty without one."""
    if before is None or stats.up_us <= before.up_us:
        return ""
    grown = getattr(stats, counter) - getattr(before, counter)
    return f" ({grown / (stats.up_us - before.up_us) * 1e6:.0f}/s)"


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"


def _mean(total: int, count: int) -> str:
    return f"{total / count:.1f}" if count else "0"


def printable(text: str) -> str:
    """Return a text from the server with terminal control characters replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def span(seconds: float) -> str:
    """Format a duration in its two largest units."""
    days, rest = divmod(int(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((index for index, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
