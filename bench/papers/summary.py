"""Summaries of the answers of an evaluation: the measures of the papers for each cell and method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.papers.evaluation import Answered, Cell, Load
from bench.papers.measures import (
    conditional_acceptance,
    mean_accepted_tokens,
    median_ratio,
    merged,
    ratio_of_means,
    spread,
)
from bench.papers.methods import AUTO, PLAIN, Method
from bench.report import Report


def summarised(answers: Sequence[Answered], loads: Sequence[Load], methods: Sequence[Method]) -> list[Report]:
    """Return a report for each cell, in order: its temperature, its streams, its methods by name, and the ratio of
    AUTO to the best fixed method."""
    cells = dict.fromkeys(Cell(answer.temperature, answer.streams) for answer in answers)
    return [_cell(cell, answers, loads, methods) for cell in cells]


def _cell(cell: Cell, answers: Sequence[Answered], loads: Sequence[Load], methods: Sequence[Method]) -> Report:
    here: dict[str, list[Answered]] = {}
    for answer in answers:
        if (answer.temperature, answer.streams) == cell:
            here.setdefault(answer.method, []).append(answer)
    plain = here.get(PLAIN, [])
    found = {}
    for method in methods:
        if mine := here.get(method.name):
            took = [load for load in loads if (load.method, load.temperature, load.streams) == (method.name, *cell)]
            found[method.name] = _method(method, mine, plain, took)
    fixed = [method.name for method in methods if method.name in found and not method.adaptive and method.samples]
    return {**cell._asdict(), "methods": found, "auto_over_best": _auto_over_best(found, fixed)}


def _method(method: Method, mine: Sequence[Answered], plain: Sequence[Answered], loads: Sequence[Load]) -> Report:
    steps, tokens = sum(answer.steps for answer in mine), sum(answer.tokens for answer in mine)
    seconds, offered = sum(answer.seconds for answer in mine), sum(answer.offered for answer in mine)
    accepted = merged(answer.accepted for answer in mine)
    rounds = dict.fromkeys(answer.round for answer in mine)
    by_round = [ratio_of_means(_rates(mine, number), _rates(plain, number)) for number in rounds]
    speed_ups = [ratio for ratio in by_round if ratio is not None]
    speed_up, deviation = spread(speed_ups) if speed_ups else (None, None)
    rows = None
    if steps and method.window_rows is not None:
        rows = 1 + offered / steps + method.window_rows
    load_seconds = sum(load.seconds for load in loads)
    times = [answer.seconds / answer.tokens for answer in mine if answer.tokens]
    return {
        "questions": len({answer.question for answer in mine}),
        "tokens": tokens,
        "steps": steps,
        "tokens_a_second": sum(load.tokens for load in loads) / load_seconds if load_seconds else None,
        "speed_up": speed_up,
        "speed_up_deviation": deviation,
        "speed_up_median": median_ratio(_rates(mine), _rates(plain)),
        "tokens_a_step": mean_accepted_tokens(tokens, steps),
        "rows_a_step": rows,
        "steps_a_second": steps / seconds,
        "milliseconds_a_token": [1e3 * time for time in _quartiles(times)],
        "accepted": accepted,
        "conditional_acceptance": conditional_acceptance(accepted),
        "compared": sum(answer.compared for answer in mine),
        "equal": sum(answer.equal for answer in mine),
        "diversity": {name: statistics.fmean(answer.diversity[name] for answer in mine) for name in mine[0].diversity},
        "categories": _by_category(mine, plain),
        "drafted": method.drafted,
        "window": method.window,
    }


def _by_category(mine: Sequence[Answered], plain: Sequence[Answered]) -> Report:
    found = {}
    for category in dict.fromkeys(answer.category for answer in mine):
        here = [answer for answer in mine if answer.category == category]
        tokens, steps = sum(answer.tokens for answer in here), sum(answer.steps for answer in here)
        rates = _rates(here)
        found[category] = {
            "speed_up": ratio_of_means(rates, _rates(plain)),
            "tokens_a_step": mean_accepted_tokens(tokens, steps),
            "mean_rate": statistics.fmean(rates.values()),
        }
    return found


def _auto_over_best(found: Mapping[str, Report], fixed: Sequence[str]) -> dict[str, float]:
    """Return, by category, AUTO's mean tokens a second divided by the largest mean of a fixed method that samples from
    the same distribution."""
    if AUTO not in found:
        return {}
    ratios = {}
    for category, auto in found[AUTO]["categories"].items():
        here = [found[name]["categories"].get(category) for name in fixed]
        if best := max((each["mean_rate"] for each in here if each), default=0.0):
            ratios[category] = auto["mean_rate"] / best
    return ratios


def _rates(answers: Sequence[Answered], number: int | None = None) -> dict[tuple[int, str], float]:
    """Return tokens a second by round and question, of all rounds or of one."""
    return {
        (answer.round, answer.question): answer.tokens_a_second
        for answer in answers
        if number is None or answer.round == number
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile; a single value is all three, no values give []."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
