"""The reason reported to a request that asks for a draft, or for much drafting, and does not get it."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from draft_service.draft_loop import ServedSession
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.session import DrafterSession
from specdec.client.errors import from_rpc
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.v2 import draft_pb2, generation_pb2, model_pb2
from specdec.wire.speculation import SPECULATIONS
from testing.mailbox import Handed
from tests.services.conftest import Directories
from tests.services.interrupted import PROMPT, slow_target
from tests.services.test_stats import of_verifier
from tests.stack import ALWAYS, REMOTE, stack, until
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode
from verifier_service.servicer import VerifierLimits

TOKENS = 40
SAMPLED = {"sampling": {"temperature": 0.8, "seed": 5}, "max_tokens": TOKENS, "ignore_end_token": True}
REJECTION = model_pb2.ACCEPTANCE_RULE_REJECTION


class Mute(DraftServicer):
    """Reads, works and sends heartbeats, but no candidates."""

    def attach(
        self, session: DrafterSession, responses: ResponseQueue[draft_pb2.DraftResponse], timeline: Timeline
    ) -> None:
        self._loop.attach(ServedSession(session, Handed(lambda extension: None, responses.send), lambda _: None))


def slow_draft() -> None:
    time.sleep(0.1)


@pytest.mark.parametrize("fields", [{"speculation": ALWAYS}, {"rule": REJECTION}], ids=["forced", "rejection"])
async def test_a_draft_that_is_late_is_told(directories: Directories, fields: dict[str, Any]) -> None:
    async with stack(
        directories.target,
        directories.near,
        delay=slow_draft,
        target_delay=slow_target,
        controller=Decided(Mode.REMOTE_DRAFT),
        patience_seconds=0.0,
    ) as services:
        plain = await services.generate(PROMPT, plain=True, **SAMPLED)
        late = await services.generate(PROMPT, **SAMPLED, **fields)
    speculation = late.finish.speculation
    assert speculation.undrafted_reason == "late"
    assert 0 < speculation.undrafted_tokens <= TOKENS
    if "rule" not in fields:
        assert late.tokens == plain.tokens
    assert not plain.finish.speculation.undrafted_tokens


async def test_a_draft_that_is_in_time_leaves_nothing_to_tell(directories: Directories) -> None:
    """If the target waits for the draft, all tokens except the first few are drafted."""
    async with stack(
        directories.target, directories.near, target_delay=lambda: time.sleep(0.06), patience_seconds=5.0
    ) as services:
        answer = await services.generate(PROMPT, speculation=ALWAYS, **SAMPLED)
    assert answer.finish.speculation.undrafted_tokens < TOKENS / 2


async def test_tokens_without_a_draft_are_counted(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        forced = await services.generate(PROMPT, speculation=ALWAYS, **SAMPLED)
        own = generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_NGRAM])
        unasked = await services.generate(PROMPT, speculation=own, **SAMPLED)
    assert forced.finish.speculation.undrafted_reason == "no_draft"
    assert forced.finish.speculation.undrafted_tokens == TOKENS
    assert unasked.finish.speculation.undrafted_reason == "off"
    assert not unasked.finish.speculation.undrafted_tokens


async def test_steps_in_which_a_draft_does_not_pay_are_as_asked(directories: Directories) -> None:
    async with stack(directories.target, directories.near, controller=Decided(Mode.OFF)) as services:
        answer = await services.generate(PROMPT, **SAMPLED)
    assert not answer.finish.speculation.undrafted_reason
    assert not answer.finish.speculation.undrafted_tokens


async def test_every_step_of_an_answer_has_a_decision(directories: Directories) -> None:
    async with stack(directories.target, directories.near, controller=Decided(Mode.OFF)) as services:
        measured = await services.generate(PROMPT, **SAMPLED)
        unasked = await services.generate(PROMPT, plain=True, **SAMPLED)
        stats = await of_verifier(services)
    for answer, why in ((measured, "plain_faster"), (unasked, "off")):
        statistics = answer.finish.speculation
        assert dict(statistics.decisions.modes) == {"off": statistics.steps}
        assert set(statistics.decisions.without) <= {why, "prompt"}
        assert sum(statistics.decisions.without.values()) == statistics.steps
    assert stats.decisions.modes["off"] == measured.finish.speculation.steps + unasked.finish.speculation.steps


async def test_a_drafter_that_is_not_loaded_is_named(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        for name in ("heads", "local_model"):
            answer = await services.generate(PROMPT, speculation=SPECULATIONS[name], **SAMPLED)
            decisions = answer.finish.speculation.decisions
            assert set(decisions.without) <= {f"{name}_not_loaded", "prompt"}
            assert decisions.without[f"{name}_not_loaded"] >= TOKENS - 1


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.verify), 2])
async def test_contrast_with_a_draft_that_says_nothing_ends(directories: Directories, drafts: int) -> None:
    """The draft has sessions and sends heartbeats, so it is not silent, and yet no token can be chosen."""
    async with stack(
        directories.target, directories.near, draft_kind=Mute, drafts=drafts, failover_seconds=0.6
    ) as services:
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await services.generate(PROMPT, max_tokens=5, rule=model_pb2.ACCEPTANCE_RULE_CONTRASTIVE)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc(lost.value).reason == "DRAFT_REQUIRED"
        await until(lambda: services.idle)


async def test_pods_that_grant_less_than_was_asked_say_so(directories: Directories) -> None:
    asked = generation_pb2.Speculation(drafters=[REMOTE], forced=True, max_candidates=100, max_depth=100)
    async with stack(
        directories.target,
        directories.near,
        target_delay=slow_target,
        verifier_limits=VerifierLimits(max_candidates=4),
        draft_limits=DraftLimits(max_depth=7),
    ) as services:
        answer = await services.generate(PROMPT, speculation=asked, **SAMPLED)
        plain = await services.generate(PROMPT, plain=True, **SAMPLED)
    assert answer.finish.speculation.granted == generation_pb2.SpeculationLimits(max_candidates=4, max_depth=7)
    assert answer.tokens == plain.tokens
    assert plain.finish.speculation.granted == generation_pb2.SpeculationLimits()
