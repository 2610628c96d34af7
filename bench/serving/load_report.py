"""The report on a load: latencies, throughput, goodput and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bench import markdown
from bench.report import Report
from bench.serving.answers import Answer, completed

LATENCIES: Mapping[str, tuple[str, Callable[[Answer], list[float]]]] = {
    "ttft": ("first token (TTFT)", lambda answer: [answer.first] if answer.pieces else []),
    "tpot": ("time per token (TPOT)", lambda answer: [] if answer.a_token is None else [answer.a_token]),
    "itl": ("pause between pieces (ITL)", lambda answer: answer.pauses),
    "e2e": ("whole request (E2E)", lambda answer: [answer.seconds]),
}
"""Latencies by name: their label, and the function that returns an answer's latencies in seconds."""
LIMITS = ("ttft", "tpot", "e2e")
"""Latencies that --goodput limits: those with one value per answer."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
COLUMNS = ("mean", *QUANTILES, "most")
MANY_CORES = 0.8
"""Cores above which the client, a single process, may be the bottleneck."""


def report_of(answers: Sequence[Answer], limits: Mapping[str, float], now: float) -> Report:
    """Return the measurements of answers to a load that ended at `now`; `limits` are seconds by latency."""
    whole = completed(answers)
    ends = [now if answer.end is None else answer.end for answer in answers]
    seconds = max(ends, default=now) - min((answer.begin for answer in answers), default=now)
    failed = [answer for answer in answers if answer.error is not None]
    good = [answer for answer in whole if _within(answer, limits)]
    return {
        "requests": len(answers),
        "complete": len(whole),
        "unfinished": sum(answer.end is None for answer in answers),
        "errors": dict(Counter(str(answer.error) for answer in failed).most_common()),
        "examples": {str(answer.error): answer.message for answer in reversed(failed)},
        "seconds": round(seconds, 3),
        "requests_a_second": rate(len(whole), seconds),
        "tokens": sum(answer.tokens for answer in whole),
        "tokens_a_second": rate(sum(answer.tokens for answer in whole), seconds),
        "tokens_are_pieces": any(answer.tokens_are_pieces for answer in whole),
        "milliseconds": {
            name: _quantiles([value for answer in whole for value in of(answer)]) for name, (_, of) in LATENCIES.items()
        },
        "limits_ms": {name: round(1e3 * limit, 3) for name, limit in limits.items()},
        "good": len(good),
        "good_a_second": rate(len(good), seconds),
    }


def _within(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Return whether an answer's latencies are within their limits. A missing latency passes: an answer of one token
    has no TPOT."""
    return all(value <= limit for name, limit in limits.items() for value in LATENCIES[name][1](answer))


def rate(count: float, seconds: float) -> float:
    """Return a count per second; 0 if no time has passed."""
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _quantiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = 1e3 * np.array(seconds)
    found = {"mean": values.mean(), "most": values.max()}
    found |= {name: np.quantile(values, quantile, method="higher") for name, quantile in QUANTILES.items()}
    return {name: round(float(found[name]), 3) for name in COLUMNS}


def table(report: Report) -> str:
    lines = [
        f"{report['model']} at {report['address']}, by {report['api']}, {report['load']}; at most "
        f"{report['max_tokens']} tokens, T = {report['temperature']:g}.",
        f"Complete: {report['complete']} of {report['requests']} requests in {report['seconds']:.1f} s, "
        f"{report['requests_a_second']:.2f} requests and {report['tokens_a_second']:.1f} tokens a second.",
    ]
    if report["limits_ms"]:
        share = report["good"] / report["requests"] if report["requests"] else 0.0
        limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in report["limits_ms"].items())
        lines.append(f"Goodput: {report['good_a_second']:.2f} requests a second, {share:.0%} of all, within {limits}.")
    if report["unfinished"]:
        lines.append(f"Unfinished: {report['unfinished']}.")
    for kind, count in report["errors"].items():
        lines.append(f"Errors: {count} of {kind}, such as: {report['examples'][kind]}")
    if report["client_cores"] > MANY_CORES:
        lines.append(f"This client took {report['client_cores']:.2f} of a core: the client may be the bottleneck.")
    if report["tokens_are_pieces"]:
        lines.append("The server reports no token counts: pieces are counted instead.")
    rows = (
        [f"{what}, ms", *(f"{found[column]:.1f}" if found else "-" for column in COLUMNS)]
        for name, (what, _) in LATENCIES.items()
        for found in (report["milliseconds"][name],)
    )
    return "\n".join([*lines, "", *markdown.table(["", *COLUMNS], rows)]) + "\n"
