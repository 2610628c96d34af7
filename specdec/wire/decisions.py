"""Speculation decisions: why a text's steps had candidates or none, summed and put into words."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.v2.model_pb2 import SpeculationDecisions

ROW_COST = "row_cost"
"""A reason for a step without candidates. `row_us`, `break_even` and `best_candidate` of `SpeculationDecisions` are
means over the steps with this reason."""

NO_DRAFTER, OFF, NO_DRAFT_SERVICE = "no_drafter", "off", "no_draft_service"
"""Reasons. The orchestrator, which knows the request, may replace a verifier's NO_DRAFTER by one of the others. A
verifier itself reports NO_DRAFT_SERVICE only for its default speculation."""

MODES: Mapping[str, str] = {
    "off": "off",
    "ngram": "n-grams",
    "local_draft": "local draft",
    "heads": "heads",
    "remote_draft": "draft service",
    "forced": "forced",
}
"""Human-readable names of modes."""

PROPOSERS: Mapping[str, str] = {
    "remote_draft": "draft service",
    "local_model": "local draft",
    "heads": "heads",
    "ngram": "n-grams",
    "lookahead": "lookahead",
    "grammar": "grammar",
}
"""Human-readable names of the sources of accepted candidates."""

REASONS: Mapping[str, str] = {
    NO_DRAFTER: "no permitted drafter is available",
    OFF: "off by request",
    "off_by_default": "off by the verifier's default",
    NO_DRAFT_SERVICE: "no draft service is available, and no other drafter is permitted",
    "heads_not_loaded": "heads are not loaded at the verifier (--heads)",
    "local_model_not_loaded": "no local draft is loaded at the verifier (--draft-model)",
    "heads_failed": "the verifier's heads failed",
    "local_model_failed": "the verifier's local draft failed",
    "heads_slower": "plain decoding is as fast as heads",
    "local_model_slower": "plain decoding is as fast as the local draft",
    "plain_faster": "plain decoding is as fast",
    "probed": "candidates were left out for a measurement",
    ROW_COST: "no candidate is worth its row",
    "no_room": "the step had no room for candidates",
    "nothing_proposed": "nothing was proposed",
    "draft_gains_nothing": "the draft hardly helps this text",
    "prompts_first": "the draft pauses while prompts are computed",
    "prompt": "the step also computed the end of the prompt",
}
"""Human-readable reasons for steps without candidates."""

MEASURED = frozenset({"plain_faster", "heads_slower", "local_model_slower"})
"""Reasons that are shown with the rates of the modes."""

DRAFTING_EVENTS = frozenset({"draft_paused", "draft_resumed", "draft_useless"})
"""Failover events without a failure: a working draft did not pay, paid again, or was wrong for a long time."""

MAX_KEYS, MAX_NAME = 32, 64
"""Maximum entries of each kind in a sum, and maximum characters of a name. Entries beyond these, which only a faulty
server sends, are dropped."""

_MAX_COUNT = (1 << 64) - 1
_MAX_FIGURE = 1e12


def rename_reason(decisions: SpeculationDecisions, reason: str, new: str) -> None:
    """Count the steps without candidates for one reason as steps for another. Counts saturate."""
    if count := decisions.without.get(reason, 0):
        del decisions.without[reason]
        decisions.without[new] = min(_MAX_COUNT, decisions.without.get(new, 0) + count)


def add_decisions(total: SpeculationDecisions, part: SpeculationDecisions) -> None:
    """Add a part's decisions to a total: counts saturate, figures are means weighted by their steps, and the part's
    rates, if any, replace the total's."""
    before, added = total.without.get(ROW_COST, 0), part.without.get(ROW_COST, 0)
    if added:
        share = added / (before + added)
        for name in ("row_us", "break_even", "best_candidate"):
            mean = getattr(total, name)
            setattr(total, name, mean + share * (_figure(getattr(part, name)) - mean))
    for name in ("modes", "without"):
        counts = getattr(total, name)
        for key, count in getattr(part, name).items():
            if key in counts or (len(counts) < MAX_KEYS and len(key) <= MAX_NAME):
                counts[key] = min(counts[key] + count, _MAX_COUNT)
    rates = {mode: _figure(rate) for mode, rate in part.mode_rates.items() if len(mode) <= MAX_NAME}
    if rates and len(rates) <= MAX_KEYS:
        total.mode_rates.clear()
        total.mode_rates.update(rates)


def _figure(value: float) -> float:
    """Return a peer's figure; 0 for an impossible one."""
    return value if 0.0 <= value <= _MAX_FIGURE else 0.0


def main_mode(decisions: SpeculationDecisions) -> str:
    """Return the most frequent mode; empty if the server reports no modes."""
    return max(decisions.modes, key=lambda mode: decisions.modes[mode], default="")


def explained(decisions: SpeculationDecisions) -> str:
    """Return a human-readable line: the modes, how many steps had candidates, and why the others had none; empty if the
    server reports no decisions."""
    steps = sum(decisions.modes.values())
    if not steps:
        return ""
    modes = sorted(decisions.modes.items(), key=lambda entry: -entry[1])
    named = [MODES.get(mode, mode) for mode, _ in modes]
    if len(modes) > 1:
        named = [f"{name} ({count} steps)" for name, (_, count) in zip(named, modes, strict=True)]
    reasons = sorted(decisions.without.items(), key=lambda entry: (entry[0] == "prompt", -entry[1]))
    without = sum(decisions.without.values())
    if without < steps:
        parts = [f"{steps - without} of {steps} steps had candidates"]
        parts += [f"{count} had none: {_reason(name, decisions)}" for name, count in reasons]
    else:
        parts = [_reason(name, decisions) for name, _ in reasons if name != "prompt" or len(reasons) == 1]
    reason = "; ".join(parts)
    # "off by request" alone, without the mode before it.
    return reason if named == ["off"] and reason.startswith("off ") else f"{', '.join(named)}: {reason}"


def proposed(sources: Mapping[str, int]) -> str:
    """Return the accepted candidates by proposer, as a human-readable line; empty if there are none."""
    found = ((words, sources[name]) for name, words in PROPOSERS.items() if name in sources)
    return ", ".join(f"{words} {count}" for words, count in sorted(found, key=lambda entry: -entry[1]) if count)


def _reason(name: str, decisions: SpeculationDecisions) -> str:
    """Return a reason with its figures."""
    words = REASONS.get(name, name)
    if name == ROW_COST and decisions.row_us:
        best = f", the best candidate brings {decisions.best_candidate:.2f}" if decisions.best_candidate else ""
        return f"a row costs {decisions.row_us / 1000:.3g} ms and must bring {decisions.break_even:.2f} tokens{best}"
    if name in MEASURED and len(decisions.mode_rates) > 1:
        rates = sorted(decisions.mode_rates.items(), key=lambda entry: -entry[1])
        reason = ", ".join(f"{'plain' if mode == 'off' else MODES.get(mode, mode)} {rate:.0f}" for mode, rate in rates)
        return f"{words} (tokens/s: {reason})"
    return words
