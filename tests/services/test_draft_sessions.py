"""A text opens a draft session once candidates may pay off, or immediately if drafting is forced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from draft_service.servicer import DraftServicer
from draft_service.session import DrafterSession
from orchestrator.models.catalog import Catalog
from orchestrator.pods.pods import Pods
from orchestrator.servicer import GenerationServicer
from specdec.v2 import draft_pb2, generation_pb2, generation_pb2_grpc, model_pb2
from tests.models import PAD, VOCABULARY, make, save
from tests.services.conftest import Directories
from tests.services.test_equality import slow_target
from tests.stack import ALWAYS, request_of, served, stack
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode

DRAFT = generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE])


class Overheard(DraftServicer):
    """Records the openings it receives."""

    asked: list[draft_pb2.DraftOpen]

    def parse(self, request: draft_pb2.DraftRequest, deadline: float | None) -> DrafterSession:
        self.asked.append(request.open)
        return super().parse(request, deadline)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.REMOTE_DRAFT])
@pytest.mark.parametrize("policy", [DRAFT, ALWAYS])
async def test_a_draft_is_asked_where_its_candidates_may_pay(
    directories: Directories, mode: Mode, policy: generation_pb2.Speculation
) -> None:
    Overheard.asked = []
    async with stack(directories.target, directories.near, draft_kind=Overheard, controller=Decided(mode)) as services:
        completion = await services.generate([5, 6, 7], max_tokens=40, ignore_end_token=True, speculation=policy)
    assert len(completion.tokens) == 40
    assert len(Overheard.asked) == (mode is Mode.REMOTE_DRAFT or policy is ALWAYS)
    assert not any(opened.policy.paused for opened in Overheard.asked)  # none is opened paused


async def test_it_is_asked_in_the_midst_of_a_text(directories: Directories) -> None:
    """The first commit with a worthwhile outlook opens the draft session, with the text up to that commit."""
    Overheard.asked = []
    controller = Decided(Mode.OFF)
    async with stack(
        directories.target, directories.near, draft_kind=Overheard, target_delay=slow_target, controller=controller
    ) as services:
        request = generation_pb2.GenerateRequest(
            tokens=generation_pb2.TokenPrompt(ids=[5, 6, 7]), max_tokens=100, ignore_end_token=True, speculation=DRAFT
        )
        tokens, sources = [], []
        async for response in services.stub.Generate(request):
            tokens += response.tokens
            sources += response.sources
            controller.decided = Mode.REMOTE_DRAFT
    (opened,) = Overheard.asked
    assert list(opened.prompt_tokens) == [5, 6, 7]
    assert 0 < len(opened.generated_tokens) < 100
    assert list(opened.generated_tokens) == tokens[: len(opened.generated_tokens)]
    assert model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in sources


async def test_tokens_that_are_contrasted_have_one_in_any_case(directories: Directories) -> None:
    Overheard.asked = []
    controller = Decided(Mode.OFF)
    async with stack(directories.target, directories.near, draft_kind=Overheard, controller=controller) as services:
        completion = await services.generate([5, 6, 7], max_tokens=10, rule=model_pb2.ACCEPTANCE_RULE_CONTRASTIVE)
    assert completion.finish.reason
    assert len(Overheard.asked) == 1


async def test_where_there_is_none_to_ask_a_text_says_so(directories: Directories) -> None:
    """Its verifier, without a draft, reports no break-even probability."""
    async with stack(directories.target, None) as services:
        peers = replace(services.peers, drafts=Pods([]))
        async with (
            served(GenerationServicer(Catalog.of(services.model, peers))) as (front, _),
            grpc.aio.insecure_channel(front) as channel,
        ):
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            request = request_of([5, 6, 7], max_tokens=20, ignore_end_token=True, speculation=DRAFT)
            answer = await stub.Complete(generation_pb2.CompleteRequest(request=request))
    (completion,) = answer.completions
    assert len(completion.tokens) == 20
    assert completion.finish.speculation.undrafted_reason == "no_draft"


async def test_a_bias_or_ban_beyond_the_drafts_vocabulary_costs_no_draft(
    directories: Directories, tmp_path: Path
) -> None:
    """Models of one family are padded to different vocabulary widths, and padding is never chosen. Tokens equal those
    of plain decoding."""
    wide = make("llama", tmp_path / "wide", vocab_size=VOCABULARY + 32)
    model = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32, local_files_only=True)
    model.resize_token_embeddings(VOCABULARY)
    narrow = save(model, tmp_path / "narrow")
    asked: dict[str, Any] = {
        "max_tokens": 40,
        "ignore_end_token": True,
        "sampling": {
            "seed": 3,
            "temperature": 0.8,
            "logit_bias": {VOCABULARY + 5: -100.0, VOCABULARY + 9: -2.0},
            "banned_tokens": [9, *range(VOCABULARY, VOCABULARY + 32)],
        },
    }
    async with stack(wide, narrow, target_delay=slow_target) as services:
        drafted = await services.generate([5, 6, 7], speculation=ALWAYS, **asked)
        plain = await services.generate([5, 6, 7], speculation=generation_pb2.Speculation(off=True), **asked)
    assert list(drafted.tokens) == list(plain.tokens)
    assert drafted.finish.speculation.undrafted_reason in ("", "late")  # it has a draft, fast or slow
    assert drafted.finish.speculation.sources["remote_draft"]


async def test_a_stop_string_that_is_a_special_token_ends_the_text(directories: Directories) -> None:
    """With and without drafts: for the pods the stop string is an end token."""
    asked: dict[str, Any] = {
        "max_tokens": 40,
        "min_tokens": 6,
        "ignore_end_token": True,
        "stop": ["<pad>"],
        "sampling": {"seed": 3, "temperature": 0.8, "logit_bias": {PAD: 100.0}},
    }
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        drafted = await services.generate([5, 6, 7], speculation=ALWAYS, **asked)
        plain = await services.generate([5, 6, 7], speculation=generation_pb2.Speculation(off=True), **asked)
        decoded = services.model.tokenizer.decode(plain.tokens)
    assert list(drafted.tokens) == list(plain.tokens)
    assert (len(plain.tokens), plain.tokens[-1], plain.finish.speculation.overrun) == (7, PAD, 0)
    for completion in (drafted, plain):
        assert (completion.finish.reason, completion.finish.stop) == (model_pb2.FINISH_REASON_STOP, "<pad>")
        assert completion.text == decoded
