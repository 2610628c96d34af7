"""The samples of a request share what depends on the request alone; their sessions are opened with their own seeds."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.generation.draft_session import DraftSession
from orchestrator.generation.speculation_policy import SpeculationState
from orchestrator.generation.verifier_stream import VerifierStream
from orchestrator.pods.errors import LostError
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.requests.sample import CommittedText
from specdec.decoding.block_hashes import HASHED_TOKENS, block_hashes
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.messages import sampling_message
from specdec.v2 import draft_pb2_grpc, generation_pb2, verifier_pb2, verifier_pb2_grpc
from tests.models import make
from tests.orchestrator.samples import context, sample
from tests.orchestrator.servers import addresses
from tests.orchestrator.test_drafting import Mute
from tests.orchestrator.test_verification import Refusing

SAMPLES = 3


class RecordingVerifier(Refusing):
    """A verifier that records openings."""

    def __init__(self) -> None:
        super().__init__("")
        self.openings: list[Any] = []

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        self.openings.append((await anext(requests)).open)


class RecordingDraft(Mute):
    """The same as a draft."""

    def __init__(self) -> None:
        super().__init__()
        self.openings: list[Any] = []

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        self.openings.append((await anext(requests)).open)


async def test_every_opening_has_the_sampling_of_its_sample(tmp_path: Path) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    sampling = generation_pb2.SamplingParameters(allowed_tokens=[7, 9], temperature=0.5, seed=3)
    samples = parse(generation_pb2.GenerateRequest(text="a", n=SAMPLES, sampling=sampling), model).samples
    first = samples[0]
    assert len({each.sampling.seed for each in samples}) == SAMPLES
    assert all(each.prompt is first.prompt and each.sampling_message is first.sampling_message for each in samples)
    verifier, draft = RecordingVerifier(), RecordingDraft()
    async with AsyncExitStack() as servers:
        (at,) = await servers.enter_async_context(
            addresses(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, verifier)
        )
        (drafts_at,) = await servers.enter_async_context(
            addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft)
        )
        pods = Pods([at, drafts_at], connect=grpc.aio.insecure_channel)
        pod, draft_pod = pods
        for each in samples:
            given = replace(context(), sample=each, text=CommittedText(each), model=model)
            async with VerifierStream(pod, given, lambda: 1.0) as stream:
                with pytest.raises(LostError):
                    await stream.open(verifier_pb2.VerifyPolicy(), attempt=1, model_fingerprint="")
            async with DraftSession(draft_pod, given, SpeculationState.initial(given)) as session:
                with pytest.raises(LostError):
                    await session.open()
        await pods.close()
    wanted = [sampling_message(each.sampling) for each in samples]
    assert [opening.sampling for opening in verifier.openings] == wanted
    assert [opening.sampling for opening in draft.openings] == wanted


TOKENS = st.lists(st.integers(0, 49), max_size=2 * HASHED_TOKENS)


@given(TOKENS, TOKENS)
def test_a_text_goes_on_with_the_hashes_of_its_prompt(prompt: list[int], generated: list[int]) -> None:
    begun = sample(prompt=prompt, generated=generated, tenant="one")
    assert CommittedText(begun).block_hashes == block_hashes([*prompt, *generated], begun.cache_scope)
