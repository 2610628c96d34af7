"""A new drafter is one new file: the unchanged draft service runs it, and its candidates reach the verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from draft_service.children import add_children
from draft_service.draft_loop import DraftLoop
from draft_service.drafter import Drafter, ExpansionError
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.session import DrafterSession
from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.serving.engine_worker import CHECK_SECONDS
from specdec.serving.errors import EngineLostError, ModelFailureError
from specdec.v2 import generation_pb2, generation_pb2_grpc, model_pb2
from tests.draft_service.fakes import Listener, session
from tests.services.conftest import Directories
from tests.services.test_equality import slow_target
from tests.stack import ALWAYS, peers_at, request_of, served, stack


class RepeatLastToken(Drafter):
    """Proposes the text's last token again."""

    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        nodes = [(each, each.take_best()) for each in sessions]
        add_children(nodes, np.array([[node.token] for _, node in nodes]), np.full((len(nodes), 1), -0.1))
        return {}


@asynccontextmanager
async def front(directories: Directories) -> AsyncIterator[Any]:
    """A stub of an orchestrator whose draft repeats tokens."""
    async with stack(directories.target, None, target_delay=slow_target) as services:
        identity = services.verifiers[0].service.identity
        loop = DraftLoop(RepeatLastToken())
        loop.start()
        service = DraftServicer(loop, identity, DraftLimits())
        async with served(service) as (draft, _):
            generation = GenerationServicer(Catalog.of(services.model, peers_at(services, draft)))
            async with served(generation) as (address, _), grpc.aio.insecure_channel(address) as channel:
                yield generation_pb2_grpc.GenerationServiceStub(channel)
        await service.close()


async def test_a_drafter_in_a_file_of_its_own_serves_requests(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True, "sampling": {"logit_bias": {7: 100.0}}}
    async with front(directories) as stub:
        request = request_of([5, 6, 7], **fields, speculation=ALWAYS)
        (completion,) = (await stub.Complete(generation_pb2.CompleteRequest(request=request))).completions
    assert list(completion.tokens) == [7] * 60
    speculation = completion.finish.speculation
    assert speculation.sources["remote_draft"] > 0
    assert speculation.steps < 60


async def test_one_that_cannot_draft_for_a_rule_is_not_used_for_it(directories: Directories) -> None:
    """The drafter has no distributions, so REJECTION continues without it."""
    async with front(directories) as stub:
        request = request_of(
            [5, 6, 7],
            max_tokens=20,
            ignore_end_token=True,
            sampling={"temperature": 0.9},
            rule=model_pb2.ACCEPTANCE_RULE_REJECTION,
            speculation=ALWAYS,
        )
        (completion,) = (await stub.Complete(generation_pb2.CompleteRequest(request=request))).completions
    assert len(completion.tokens) == 20
    assert completion.finish.speculation.sources["remote_draft"] == 0
    assert completion.finish.speculation.undrafted_reason == "no_draft"


class Broken(RepeatLastToken):
    """Fails until it is repaired."""

    mended = False

    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        raise ExpansionError(sessions, RuntimeError("broken"))

    def recover(self) -> bool:
        return self.mended


def test_one_that_does_not_recover_serves_nobody_until_it_does() -> None:
    drafter = Broken()
    loop = DraftLoop(drafter)
    listener = Listener(loop, session())
    loop.turn()
    assert [type(error) for error in listener.failed] == [EngineLostError]
    assert loop.turn() == CHECK_SECONDS
    with pytest.raises(EngineLostError):
        Listener(loop, session())
    drafter.mended = True
    loop.turn()
    Listener(loop, session())


class Mistaken(RepeatLastToken):
    """Has a bug triggered by one session's text."""

    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        if any(each.tree.root.token == 9 for each in sessions):
            raise KeyError(9)
        return super().expand(sessions)


def test_a_mistake_in_a_drafter_ends_the_session_that_reveals_it() -> None:
    """Neither the service nor other sessions end."""
    loop = DraftLoop(Mistaken())
    doomed, good = session(prompt=[1, 9]), session()
    listeners = Listener(loop, doomed), Listener(loop, good)
    for _ in range(20):
        loop.turn()
    assert [[type(error) for error in each.failed] for each in listeners] == [[ModelFailureError], []]
    assert good.tree.size
