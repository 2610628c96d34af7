"""What the servicer makes of the messages of an open session."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.growth_loop import GrowthLoop
from draft_service.servicer import DraftServicer, Limits
from specdec.v1 import draft_pb2, model_pb2
from tests.draft.test_growth_loop import Engine, session


@pytest.mark.parametrize("granted", [1, 64, 200])
def test_a_session_gets_back_what_another_verifier_grants(granted: int) -> None:
    """As far as it has memory."""
    servicer = DraftServicer(GrowthLoop(Engine()), model_pb2.ModelIdentity(), Limits())
    draft = session(max_nodes=200)
    draft.own(np.arange(1, 1 + draft.end + draft.policy.max_nodes))
    for most, becomes in ((granted, granted), (256, 200), (0, 200)):
        request = draft_pb2.DraftRequest(policy=draft_pb2.DraftPolicy(max_nodes=most))
        servicer.act(draft, request, 0.0)
        assert draft.policy.max_nodes == becomes
