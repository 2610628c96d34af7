"""Names of drafters: complete, and the same for clients, services and decoding."""

from __future__ import annotations

from typing import get_args

import pytest

from specdec.client import build_request
from specdec.decoding.speculation import (
    ALL_DRAFTERS,
    NO_DRAFTERS,
    OWN_DRAFTERS,
    CandidateSource,
    Scorer,
    SpeculationOptions,
)
from specdec.serving.messages import speculation_from
from specdec.v2.model_pb2 import DraftScorer
from specdec.wire.speculation import DRAFTERS, IN_WORDS, SCORERS, SPECULATIONS, DrafterName, ScorerName, SpeculationName


def test_every_drafter_of_the_contract_has_a_source() -> None:
    assert {source.name.lower(): int(source) for source in CandidateSource} == DRAFTERS


def test_every_drafter_inside_the_verifier_has_words() -> None:
    assert list(IN_WORDS) == [source.name.lower() for source in sorted(OWN_DRAFTERS)]


def test_type_checkers_know_the_names() -> None:
    assert get_args(DrafterName) == tuple(DRAFTERS)
    assert get_args(SpeculationName) == tuple(SPECULATIONS)
    assert get_args(ScorerName) == tuple(SCORERS)


def test_every_scorer_of_the_contract_has_a_name() -> None:
    assert set(map(int, DraftScorer.values())) - {0} == set(map(int, SCORERS.values())) == set(map(int, Scorer))


def test_each_of_the_verifiers_drafters_is_asked_for_by_its_name_alone() -> None:
    for source in OWN_DRAFTERS:
        wanted = build_request("hi", speculation=source.name.lower()).speculation  # type: ignore[arg-type]
        assert speculation_from(wanted) == SpeculationOptions(frozenset({source}))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("auto", SpeculationOptions(unspecified=True)),
        ("off", SpeculationOptions(NO_DRAFTERS)),
        ("draft", SpeculationOptions(frozenset({CandidateSource.REMOTE}))),
        ("always", SpeculationOptions(frozenset({CandidateSource.REMOTE}), forced=True)),
        ("local", SpeculationOptions(OWN_DRAFTERS)),
        ("jacobi", SpeculationOptions(frozenset({CandidateSource.LOOKAHEAD}), jacobi=True)),
    ],
)
def test_a_name_means_the_same_to_services(name: SpeculationName, meant: SpeculationOptions) -> None:
    assert speculation_from(SPECULATIONS[name]) == meant


def test_who_names_all_drafters_has_specified_them() -> None:
    wanted = build_request("hi", drafters=get_args(DrafterName)).speculation
    assert speculation_from(wanted) == SpeculationOptions(ALL_DRAFTERS)
