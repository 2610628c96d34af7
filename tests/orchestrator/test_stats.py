"""Samples count as goodput if and only if their texts were completed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orchestrator.metrics import metrics
from orchestrator.models.stats import OrchestratorStats
from orchestrator.text.transcript import Statistics
from specdec.serving.errors import DeadlineError
from specdec.serving.timeline import Timeline, Timelines
from specdec.v2 import generation_pb2, model_pb2
from tests.hostile.keyless_grpc import RawConnection
from tests.stack import served, until

CALLS = 10


class Text(SimpleNamespace):
    """A transcript's figures."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def transcript(tokens: int) -> Any:
    """Return a transcript that began with two tokens and now has `tokens`."""
    return Text(
        usage=generation_pb2.Usage(prompt_tokens=5, completion_tokens=tokens),
        statistics=Statistics(),
        generated_tokens=tokens - 2,
        finish_reason=model_pb2.FINISH_REASON_UNSPECIFIED,
    )


def test_a_complete_text_is_goodput_even_if_its_caller_leaves_with_the_last_token() -> None:
    stats, text = OrchestratorStats(), transcript(12)
    text.finish_reason = model_pb2.FINISH_REASON_LENGTH
    with pytest.raises(GeneratorExit), stats.sample(text):
        raise GeneratorExit
    assert (stats.generated_tokens, stats.finished_tokens) == (10, 10)
    assert stats.finished == {"length": 1}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), DeadlineError("late"), GeneratorExit()])
def test_a_text_that_breaks_off_is_not(error: BaseException) -> None:
    stats = OrchestratorStats()
    with pytest.raises(type(error)), stats.sample(transcript(12)):
        raise error
    assert (stats.generated_tokens, stats.finished_tokens) == (10, 0)
    assert not stats.finished


def test_the_counts_of_all_samples_grow_while_they_run() -> None:
    stats, one, other = OrchestratorStats(), transcript(12), transcript(5)
    one.statistics = Statistics(steps=4, offered=8, accepted=6, sources=Counter(ngram=6, bonus=4))
    with stats.sample(one), stats.sample(other):
        seen = OrchestratorStats.summed([stats, OrchestratorStats()])
        assert (len(seen.running), seen.generated_tokens) == (2, 0)
        assert seen.all_samples == generation_pb2.SampleCounts(
            tokens=13, steps=4, offered_candidates=8, accepted_candidates=6
        )
        other.generated_tokens = 9
        assert stats.all_samples.tokens == 19
    assert not stats.running
    assert (stats.all_samples.tokens, stats.generated_tokens) == (19, 19)
    assert stats.sources == {"ngram": 6, "bonus": 4}


def test_decisions_of_samples_are_summed() -> None:
    stats, text = OrchestratorStats(), transcript(3)
    text.statistics.decisions.CopyFrom(model_pb2.SpeculationDecisions(modes={"off": 2}, without={"plain_faster": 2}))
    for _ in range(2):
        with stats.sample(text):
            pass
    assert OrchestratorStats.summed([stats, stats]).decisions.modes == {"off": 8}
    assert stats.decisions.without == {"plain_faster": 4}


def test_a_shared_draft_is_counted_once_in_its_worst_state() -> None:
    """Revisions judge it separately, and the order of their views does not matter."""
    closed, half, broken = (
        generation_pb2.PodView(address="d:1", breaker=breaker, sessions=1)
        for breaker in (
            generation_pb2.BREAKER_STATE_CLOSED,
            generation_pb2.BREAKER_STATE_HALF_OPEN,
            generation_pb2.BREAKER_STATE_OPEN,
        )
    )
    unfit = generation_pb2.PodView(
        address="d:1", breaker=generation_pb2.BREAKER_STATE_CLOSED, unfit_reason="tokenizer_mismatch", sessions=1
    )
    by_badness = [(closed, "closed"), (half, "half_open"), (broken, "open"), (unfit, "unfit")]
    for (better, _), (worse, wanted) in pairwise(by_badness):
        for views in ((better, worse), (worse, better)):
            found = {
                metric.name.removeprefix("specdec_orchestrator_"): metric.samples
                for metric in metrics(generation_pb2.GenerationServiceGetStatsResponse(drafts=views), {}, {})
            }
            assert [pod.labels for pod in found["pods"] if pod.value] == [{"role": "draft", "state": wanted}]
            assert [pod.value for pod in found["pod_sessions"]] == [2]


class Endless:
    """A service whose answers never end."""

    name = "tests.Endless"
    path = f"/{name}/Answer"

    def __init__(self) -> None:
        self.stats = OrchestratorStats()
        self.timelines: list[Timeline] = []

    def register(self, server: Any) -> None:
        methods: dict[str, Any] = {"Answer": grpc.unary_stream_rpc_method_handler(self._answer, bytes, bytes)}
        server.add_registered_method_handlers(self.name, methods)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, methods),))

    async def close(self) -> None:
        pass

    async def _answer(self, request: bytes, context: Any) -> None:
        with self.stats.request("default"), Timelines().begin("generate") as timeline:
            self.timelines.append(timeline)
            while True:
                await context.write(bytes(1 << 20))


async def test_a_caller_who_leaves_during_a_blocked_write_has_cancelled() -> None:
    """gRPC fails the write before it cancels the call. The connection's window is smaller than the message."""
    service = Endless()
    async with served(service) as (address, _):
        async with AsyncExitStack() as callers:
            for _ in range(CALLS):
                caller = await callers.enter_async_context(RawConnection(address))
                caller.send("whole", 1, Endless.path)
            await until(lambda: service.stats.running_requests == CALLS)
        await until(lambda: not service.stats.running_requests)
    assert (service.stats.cancelled, service.stats.failed) == (CALLS, {})
    ended = [(timeline.error, timeline.has("closed_by_caller")) for timeline in service.timelines]
    assert ended == [("", True)] * CALLS
