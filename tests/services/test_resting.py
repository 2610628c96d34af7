"""A draft whose candidates have not paid of late begins at rest, unless it is asked for all the same."""

from __future__ import annotations

import pytest

from draft_service.servicer import DraftServicer
from draft_service.session import Session
from specdec.v1 import draft_pb2, generation_pb2
from tests.services.conftest import Directories
from tests.stack import stack


class Overheard(DraftServicer):
    """Notes from which reach on each session is to grow candidates at first."""

    least: list[float]

    def parse(self, request: draft_pb2.DraftRequest) -> Session:
        self.least.append(request.open.policy.min_reach)
        return super().parse(request)


@pytest.mark.parametrize("price", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", [generation_pb2.SPECULATION_MODE_DRAFT, generation_pb2.SPECULATION_MODE_ALWAYS])
async def test_it_begins_as_its_price_says(
    directories: Directories, price: float, mode: generation_pb2.SpeculationMode.ValueType
) -> None:
    Overheard.least = []
    always = mode == generation_pb2.SPECULATION_MODE_ALWAYS
    async with stack(directories.target, directories.near, draft_kind=Overheard) as services:
        services.verifier_loop.price_for = lambda session, sessions: price  # type: ignore[method-assign]
        policy = generation_pb2.SpeculationPolicy(mode=mode)
        await services.generate([5, 6, 7], max_tokens=10, ignore_end_token=True, speculation=policy)
    (least,) = Overheard.least
    assert (least >= 1) is (price >= 1 and not always)
