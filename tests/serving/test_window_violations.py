"""Windows that a request may not have are refused by name, value and limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import ALL_DRAFTERS, OWN_DRAFTERS, CandidateSource, SpeculationOptions
from specdec.serving.validation import MAX_GUESSES, MAX_WINDOW_ROWS, window_violations

NGRAM = frozenset({CandidateSource.NGRAM})
SMALL, JACOBI = Lookahead(5, 3, 5), Lookahead(8, 2, 1)


def options(size: Lookahead | None = SMALL, drafters: frozenset[CandidateSource] = OWN_DRAFTERS) -> SpeculationOptions:
    return SpeculationOptions(drafters, lookahead=size)


def found(asked: SpeculationOptions, rule: Rule = Rule.COUPLED, most: int = MAX_WINDOW_ROWS) -> dict[str, str]:
    return dict(window_violations("s", asked, rule, most))


@given(st.integers(0, 200), st.integers(0, 9), st.integers(0, 99), st.integers(1, MAX_WINDOW_ROWS))
def test_a_size_is_taken_if_and_only_if_it_is_within_the_limits(w: int, n: int, g: int, most: int) -> None:
    size = Lookahead(w, n, g)
    fits = w >= 2 and n >= 2 and 1 <= g <= MAX_GUESSES and size.most_rows <= most
    assert (not found(options(size), most=most)) is fits


def test_value_and_limit_are_named() -> None:
    asked = options(Lookahead(40, 5, 3))
    assert found(asked, most=64) == {"s.lookahead": "is (40, 5, 3), adds 168 tokens to a step, must add at most 64"}
    assert found(options(Lookahead(1, 3, 65))) == {
        "s.lookahead.window": "is 1, must be at least 2",
        "s.lookahead.guesses": "is 65, must be 1 to 64",
    }


@pytest.mark.parametrize(
    ("asked", "rule", "field", "problem"),
    [
        (options(drafters=NGRAM), Rule.COUPLED, "lookahead", "requires the drafter LOOKAHEAD"),
        (SpeculationOptions(NGRAM, jacobi=True), Rule.COUPLED, "jacobi", "requires the drafter LOOKAHEAD"),
        (options(), Rule.CONTRASTIVE, "lookahead", "requires a rule other than CONTRASTIVE"),
        (
            options(drafters=ALL_DRAFTERS),
            Rule.REJECTION,
            "lookahead",
            "under REJECTION requires drafters without REMOTE",
        ),
        (options(JACOBI), Rule.REJECTION, "lookahead", "needs temperature 0 or another"),
        (
            SpeculationOptions(OWN_DRAFTERS, jacobi=True),
            Rule.REJECTION,
            "jacobi",
            "needs temperature 0 or another",
        ),
        (replace(options(), jacobi=True), Rule.COUPLED, "lookahead.ngram", "is 3, must be 2 with jacobi"),
    ],
)
def test_windows_that_could_not_open_are_refused(
    asked: SpeculationOptions, rule: Rule, field: str, problem: str
) -> None:
    (violation,) = found(asked, rule).items()
    assert violation[0] == f"s.{field}"
    assert problem in violation[1]


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (SpeculationOptions(), Rule.CONTRASTIVE),
        (options(drafters=ALL_DRAFTERS), Rule.COUPLED),
        (options(), Rule.REJECTION),
        (replace(options(JACOBI), jacobi=True), Rule.COUPLED),
    ],
)
def test_others_are_taken(asked: SpeculationOptions, rule: Rule) -> None:
    assert not found(asked, rule)
