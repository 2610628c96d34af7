"""Summaries, tables and plots of made-up answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.papers.evaluation import Answered, Load
from bench.papers.measures import diversity
from bench.papers.methods import methods_named
from bench.papers.plots import plot
from bench.papers.report import table
from bench.papers.summary import summarised

NAMES = ("auto", "ngram", "lookahead:3,3,3", "lookahead:7,4,7", "coupled:1-2", "rejection:1-2", "contrastive")
METHODS = methods_named(NAMES, 0.1)


def answer(method: str, question: str, rate: float, number: int = 0, **fields: Any) -> Answered:
    """Return an answer of 100 tokens at `rate` tokens a second, in 60 steps; 40 of them accept a candidate."""
    usual: dict[str, Any] = {
        "temperature": 0.8,
        "streams": 1,
        "category": question[0],
        "seconds": 100 / rate,
        "tokens": 100,
        "steps": 60,
        "offered": 120,
        "accepted": [20, 40],
        "sources": {"ngram": 40, "bonus": 60},
        "compared": 100,
        "equal": 100,
        "diversity": diversity(["one two one two"]),
    }
    return Answered(method=method, question=question, round=number, **(usual | fields))


def cell(answers: Sequence[Answered], loads: Sequence[Load] = ()) -> dict[str, Any]:
    """Return the summary of the only cell."""
    (found,) = summarised(answers, loads, METHODS)
    return found


PLAIN = [
    answer("plain", name, rate, number, offered=0, steps=100, accepted=[100])
    for number, rates in enumerate(((10.0, 30.0), (10.0, 50.0)))
    for name, rate in zip(("a1", "b1"), rates, strict=True)
]


def test_speed_ups_are_within_rounds_and_spread_over_them() -> None:
    mine = [answer("ngram", *each) for each in (("a1", 20.0, 0), ("b1", 60.0, 0), ("a1", 30.0, 1), ("b1", 60.0, 1))]
    found = cell([*PLAIN, *mine])["methods"]["ngram"]
    assert found["speed_up"] == pytest.approx((80 / 40 + 90 / 60) / 2)
    assert found["speed_up_deviation"] == pytest.approx(0.5 / 2**0.5)
    assert found["speed_up_median"] == 2.0
    assert {name: each["speed_up"] for name, each in found["categories"].items()} == {
        "a": pytest.approx(50 / 20),
        "b": pytest.approx(120 / 80),
    }
    assert cell(PLAIN)["methods"]["plain"]["speed_up"] == 1.0


def test_steps_and_candidates_are_summed() -> None:
    mine = [answer("lookahead:3,3,3", "a1", 20.0), answer("lookahead:3,3,3", "b1", 20.0, accepted=[0, 0, 60])]
    found = cell([*PLAIN, *mine], [Load("lookahead:3,3,3", 0.8, 1, 8.0, 200)])["methods"]["lookahead:3,3,3"]
    assert found["tokens_a_second"] == 25.0
    assert found["tokens_a_step"] == pytest.approx(200 / 120)
    assert found["steps_a_second"] == 12.0
    assert found["rows_a_step"] == 1 + 2 + 5
    assert found["accepted"] == [20, 40, 60]
    assert found["conditional_acceptance"] == pytest.approx([100 / 120, 60 / 100])
    assert found["milliseconds_a_token"] == [50.0, 50.0, 50.0]
    assert (found["questions"], found["equal"], found["compared"]) == (2, 200, 200)


def test_auto_is_compared_with_the_best_fixed_method_of_each_category() -> None:
    mine = [
        *(answer("auto", "a1", 19.0), answer("auto", "b1", 90.0)),
        *(answer("ngram", "a1", 20.0), answer("ngram", "b1", 45.0)),
        *(answer("contrastive", "a1", 900.0), answer("contrastive", "b1", 900.0)),
    ]
    assert cell([*PLAIN[:2], *mine])["auto_over_best"] == {"a": pytest.approx(0.95), "b": pytest.approx(2.0)}
    assert cell(PLAIN)["auto_over_best"] == {}


def test_cells_are_apart() -> None:
    answers = [*PLAIN, *(answer("plain", "a1", 5.0, streams=4), answer("ngram", "a1", 10.0, streams=4))]
    one, four = summarised(answers, [], METHODS)
    assert [one["streams"], four["streams"]] == [1, 4]
    assert set(one["methods"]) == {"plain"}
    assert four["methods"]["ngram"]["speed_up"] == 2.0


@pytest.fixture
def report() -> dict[str, Any]:
    answers = list(PLAIN)
    for number, method in enumerate(METHODS[1:], 1):
        accepted: dict[str, Any] = {
            "accepted": [20] * (number + 4),
            "compared": 100 if method.exact else 0,
            "equal": 99,
        }
        answers += [answer(method.name, question, 20.0 * number, **accepted) for question in ("a1", "b1")]
    return {
        "target": "t",
        "draft": "d",
        "dtype": "float32",
        "tokens": 100,
        "rounds": 2,
        "questions": {"a": 1, "b": 1},
        "cells": summarised(answers, [Load("plain", 0.8, 1, 4.0, 200)], METHODS),
        "exact": True,
        "failed": {"heads": "refused"},
        "skipped": {"set/7": "too long"},
        "machine": {"cores": 2, "processor": "p"},
    }


def test_the_table_tells_all_measures(report: dict[str, Any]) -> None:
    said = table(report)
    assert "## T = 0.8, 1 stream\n" in said
    assert "| plain | 50.0 | 1.00 ± 0.00 | 1.00 | 1.00 | 1.0 |" in said
    assert "| 198 of 200 |" in said
    assert "Run time by tokens drafted, rejection, ms a token: 1: " in said
    assert "auto over the fixed method that turned out best" in said
    assert "Left out: heads: refused" in said
    assert "Questions left out: 1, such as set/7: too long" in said
    assert "not exact" not in said
    tables = [block.splitlines() for block in said.split("\n\n") if block.startswith("|")]
    assert len(tables) == 5
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)
    assert "The numerics of the deployment are not exact" in table(report | {"exact": False})


def test_the_figures_of_single_papers_are_drawn_where_their_methods_ran(report: dict[str, Any], tmp_path: Path) -> None:
    plot(report, tmp_path / "papers.png")
    names = {"papers.png", "papers-acceptance.png", "papers-drafted.png", "papers-windows.png"}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir())


def test_other_figures_are_not_drawn(report: dict[str, Any], tmp_path: Path) -> None:
    plot(report | {"cells": []}, tmp_path / "papers.png")
    assert not list(tmp_path.iterdir())
    plot(report | {"cells": summarised(PLAIN, [], METHODS)}, tmp_path / "papers.png")
    assert {file.name for file in tmp_path.iterdir()} == {"papers.png", "papers-acceptance.png"}
