"""The verifier's enumerations equal those of the contract, by name and number."""

from __future__ import annotations

from specdec.decoding.speculation import CandidateSource
from specdec.v2 import model_pb2
from verifier_service.backend.result import FinishReason, TokenSource


def test_enumerations_are_those_of_the_contract() -> None:
    for ours, contract, prefix in (
        (TokenSource, model_pb2.TokenSource, "TOKEN_SOURCE_"),
        (FinishReason, model_pb2.FinishReason, "FINISH_REASON_"),
        (CandidateSource, model_pb2.Drafter, "DRAFTER_"),
    ):
        values = {name.removeprefix(prefix): number for name, number in contract.items() if number}
        assert {member.name: member.value for member in ours} == values
