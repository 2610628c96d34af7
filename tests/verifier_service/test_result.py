"""Results of verification: their enumerations equal the protocol's, and a step's reports for drafts are bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.speculation import CandidateSource
from specdec.v2 import model_pb2
from verifier_service.backend.result import FinishReason, TokenSource
from verifier_service.verification.verified_step import evenly


def test_enumerations_are_those_of_the_contract() -> None:
    for ours, contract, prefix in (
        (TokenSource, model_pb2.TokenSource, "TOKEN_SOURCE_"),
        (FinishReason, model_pb2.FinishReason, "FINISH_REASON_"),
        (CandidateSource, model_pb2.Drafter, "DRAFTER_"),
    ):
        values = {name.removeprefix(prefix): number for name, number in contract.items() if number}
        assert {member.name: member.value for member in ours} == values


@given(st.integers(0, 100), st.integers(1, 20))
def test_places_of_a_step_are_evenly_spaced(count: int, most: int) -> None:
    taken = list(evenly(range(count), most))
    assert len(taken) <= most
    assert len(taken) >= min(count, most) / 2
    assert len(set(np.diff(taken).tolist())) <= 1
