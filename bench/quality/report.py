"""The report of the quality benchmark: means with errors, significance of differences, a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench import markdown
from bench.diversity import distinct, entropy
from specdec.client import Completion

MEASURES: dict[str, Callable[[Sequence[int]], float]] = {
    "entropy 1": partial(entropy, n=1),
    "entropy 2": partial(entropy, n=2),
    "entropy 3": partial(entropy, n=3),
    "distinct 1": partial(distinct, n=1),
    "distinct 2": partial(distinct, n=2),
}
NOISE = 3.0
"""Standard errors within which two means count as equal. If the five differences of equal methods were independent, one
run in 75 would have a difference above this; they are correlated, so fewer runs do."""


@dataclass(frozen=True)
class Text:
    """The measures of one sample."""

    prompt: int
    tokens: int
    drafted: int  # accepted draft tokens
    measures: Mapping[str, float]


@dataclass(frozen=True)
class Mean:
    value: float
    error: float | None  # standard error, from the variance within prompts; None if a prompt has a single text


def measured(prompt: int, completion: Completion) -> Text:
    values = {name: measure(completion.tokens) for name, measure in MEASURES.items()}
    drafted = sum(source == "remote_draft" for source in completion.sources)
    return Text(prompt, len(completion.tokens), drafted, values)


def mean(texts: Sequence[Text], measure: str) -> Mean:
    """Return the mean over prompts of each prompt's mean, so that the error covers sampling, not the prompts."""
    by_prompt: dict[int, list[float]] = {}
    for text in texts:
        by_prompt.setdefault(text.prompt, []).append(text.measures[measure])
    value = statistics.fmean(statistics.fmean(values) for values in by_prompt.values())
    if any(len(values) < 2 for values in by_prompt.values()):
        return Mean(value, None)
    variances = [statistics.variance(values) / len(values) for values in by_prompt.values()]
    return Mean(value, math.sqrt(sum(variances)) / len(by_prompt))


def difference(one: Mean, other: Mean) -> float | None:
    """Return the difference in standard errors; None if a mean has none."""
    if one.error is None or other.error is None:
        return None
    error = math.hypot(one.error, other.error)
    apart = one.value - other.value
    return apart / error if error else math.copysign(math.inf, apart) if apart else 0.0


def reported(texts: Mapping[str, Sequence[Text]]) -> dict[str, Any]:
    means = {method: {name: mean(found, name) for name in MEASURES} for method, found in texts.items()}
    apart = {name: difference(means["speculative"][name], means["naive"][name]) for name in MEASURES}
    compared = [abs(value) for value in apart.values() if value is not None]
    return {
        "methods": {
            method: {
                "texts": len(found),
                "tokens_a_text": statistics.fmean(text.tokens for text in found),
                "drafted": sum(text.drafted for text in found) / max(1, sum(text.tokens for text in found)),
                "measures": {name: asdict(value) for name, value in means[method].items()},
            }
            for method, found in texts.items()
        },
        "speculative_minus_naive": apart,
        "within_noise": max(compared) < NOISE if compared else None,
    }


def table(report: dict[str, Any]) -> str:
    names = list(MEASURES)
    lines = [
        f"Target: {report['target']}. Draft: {report['draft']}. T = {report['temperature']:g}, alpha = "
        f"{report['alpha']:g}; {len(report['prompts'])} prompts, texts of up to {report['tokens']} tokens.",
        "",
        markdown.head(["method", "texts", "tokens a text", "drafted", *(f"{name}-gram" for name in names)]),
    ]
    for method, found in report["methods"].items():
        cells = [
            f"{value['value']:.3f}" + ("" if value["error"] is None else f" ± {value['error']:.3f}")
            for value in (found["measures"][name] for name in names)
        ]
        about = [method, found["texts"], f"{found['tokens_a_text']:.0f}", f"{found['drafted']:.2f}"]
        lines.append(markdown.row([*about, *cells]))
    apart = report["speculative_minus_naive"]
    cells = ["-" if apart[name] is None else f"{apart[name]:+.1f}" for name in names]
    lines.append(markdown.row(["*speculative minus naive, standard errors*", "", "", "", *cells]))
    result = {True: "within noise", False: "NOT within noise", None: "not compared"}[report["within_noise"]]
    lines += ["", f"Speculative sampling is as varied as naive sampling: {result} ({NOISE:g} standard errors)."]
    return "\n".join(lines) + "\n"
