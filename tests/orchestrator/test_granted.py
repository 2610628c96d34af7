"""The limits of a request as granted by pods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.generation.sample_context import GrantedLimits
from specdec.decoding.speculation import SpeculationOptions
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2

ASKED = st.integers(1, 128)
GRANTS = st.lists(st.integers(0, 128), max_size=4)


@given(asked=ASKED, grants=GRANTS)
def test_the_least_that_any_pod_grants_is_told(asked: int, grants: list[int]) -> None:
    """0 means unset, as from a pod without the field."""
    granted = GrantedLimits(SpeculationOptions(max_candidates=asked, max_branches=asked))
    for grant in grants:
        granted.by_verifier(verifier_pb2.VerifyOpened(max_candidates=grant))
        granted.by_draft(draft_pb2.DraftOpened(max_branches=grant))
    least = min([asked, *filter(None, grants)])
    assert granted.message() == generation_pb2.SpeculationLimits(max_candidates=least, max_branches=least)


@given(grants=GRANTS)
def test_what_the_request_left_to_the_services_is_unset(grants: list[int]) -> None:
    granted = GrantedLimits(SpeculationOptions())
    for grant in grants:
        granted.by_verifier(verifier_pb2.VerifyOpened(max_candidates=grant))
        granted.by_draft(draft_pb2.DraftOpened(max_depth=grant, max_branches=grant))
    assert granted.message() == generation_pb2.SpeculationLimits()
