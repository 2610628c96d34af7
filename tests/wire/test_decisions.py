"""Decisions on several parts of a text are summed, and explained in words."""

from __future__ import annotations

import math

import pytest

from specdec.v2.model_pb2 import SpeculationDecisions
from specdec.wire.decisions import (
    MAX_KEYS,
    MAX_NAME,
    MODES,
    OFF,
    REASONS,
    add_decisions,
    explained,
    main_mode,
    proposed,
)
from verifier_service.backend import result
from verifier_service.backend.result import Without


def test_figures_are_means_over_the_steps_they_are_of() -> None:
    total = SpeculationDecisions()
    add_decisions(
        total,
        SpeculationDecisions(
            modes={"off": 3}, without={"row_cost": 3}, row_us=1000, break_even=0.5, best_candidate=0.25
        ),
    )
    add_decisions(total, SpeculationDecisions(modes={"ngram": 5}, mode_rates={"off": 90.0}))
    add_decisions(
        total,
        SpeculationDecisions(
            modes={"off": 1}, without={"row_cost": 1}, row_us=5000, break_even=0.9, best_candidate=0.25
        ),
    )
    assert dict(total.modes) == {"off": 4, "ngram": 5}
    assert (total.row_us, total.break_even, total.best_candidate) == pytest.approx((2000, 0.6, 0.25))
    assert dict(total.mode_rates) == {"off": 90.0}
    assert main_mode(total) == "ngram"


def test_a_faulty_server_cannot_make_a_sum_grow_or_become_no_number() -> None:
    total = SpeculationDecisions()
    for start in range(0, 10 * MAX_KEYS, MAX_KEYS):
        modes = {f"mode {number}": 1 for number in range(start, start + MAX_KEYS)}
        add_decisions(total, SpeculationDecisions(modes=modes, mode_rates={"a" * (MAX_NAME + 1): 1.0}))
    add_decisions(total, SpeculationDecisions(modes={"m" * (MAX_NAME + 1): 1}))
    assert len(total.modes) == MAX_KEYS
    assert not total.mode_rates
    most = SpeculationDecisions(modes={"mode 0": (1 << 64) - 1}, without={"row_cost": 1}, row_us=math.nan)
    add_decisions(total, most)
    add_decisions(total, SpeculationDecisions(without={"row_cost": 1}, row_us=-1, best_candidate=math.inf))
    assert total.modes["mode 0"] == (1 << 64) - 1
    assert (total.row_us, total.best_candidate) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({}, ""),
        ({"modes": {"off": 9}, "without": {"no_drafter": 9}}, "off: no permitted drafter is available"),
        ({"modes": {"off": 9}, "without": {"off": 8, "prompt": 1}}, "off by request"),
        (
            {"modes": {"off": 2, "ngram": 7}, "without": {"off": 2}},
            "n-grams (7 steps), off (2 steps): 7 of 9 steps had candidates; 2 had none: off by request",
        ),
        (
            {"modes": {"off": 9}, "without": {"heads_not_loaded": 9}},
            "off: heads are not loaded at the verifier (--heads)",
        ),
        (
            {"modes": {"off": 9}, "without": {"heads_slower": 9}, "mode_rates": {"heads": 95.6, "off": 104.2}},
            "off: plain decoding is as fast as heads (tokens/s: plain 104, heads 96)",
        ),
        (
            {
                "modes": {"off": 9},
                "without": {"plain_faster": 8, "prompt": 1},
                "mode_rates": {"ngram": 95.6, "off": 104.2},
            },
            "off: plain decoding is as fast (tokens/s: plain 104, n-grams 96)",
        ),
        (
            {
                "modes": {"remote_draft": 9},
                "without": {"row_cost": 9},
                "row_us": 1400,
                "break_even": 0.52,
                "best_candidate": 0.31,
            },
            "draft service: a row costs 1.4 ms and must bring 0.52 tokens, the best candidate brings 0.31",
        ),
        (
            {"modes": {"off": 2, "ngram": 7}, "without": {"nothing_proposed": 1, "plain_faster": 2, "prompt": 1}},
            "n-grams (7 steps), off (2 steps): 5 of 9 steps had candidates; 2 had none: plain decoding is as fast; 1 "
            "had none: nothing was proposed; 1 had none: the step also computed the end of the prompt",
        ),
        ({"modes": {"ngram": 1}, "without": {"prompt": 1}}, "n-grams: the step also computed the end of the prompt"),
        ({"modes": {"new": 1}, "without": {"newer": 1}}, "new: newer"),
    ],
)
def test_decisions_in_words(told: dict[str, object], line: str) -> None:
    assert explained(SpeculationDecisions(**told)) == line  # type: ignore[arg-type]


def test_every_mode_and_reason_has_words() -> None:
    assert MODES.keys() == set(result.MODES)
    assert REASONS.keys() == {*Without, OFF}


def test_who_proposed_what_was_accepted() -> None:
    assert proposed({"ngram": 3, "remote_draft": 9, "bonus": 4, "lookahead": 0}) == "draft service 9, n-grams 3"
    assert proposed({"plain": 4}) == ""
