"""Prompts' log-probabilities equal transformers', whatever is cached, fails or runs concurrently; each is sent once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specdec.v2 import generation_pb2, model_pb2
from tests.models import VOCABULARY
from tests.services.conftest import Directories
from tests.stack import Stack, long_steps, request_of, stack, until

TOP = 3


class Scorer:
    """Transformers' log-probabilities."""

    def __init__(self, target: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.inference_mode()
    def check(self, prompt: list[int], got: Iterable[generation_pb2.PromptToken], top: int = TOP) -> None:
        """Check that these are the tokens of the prompt, with the right log-probabilities."""
        logits = self._model(torch.tensor([prompt]), use_cache=False).logits[0]
        want = torch.log_softmax(logits, dim=-1).numpy()
        first, *others = got
        assert [first.token, *(entry.token for entry in others)] == prompt
        assert not first.HasField("logprobs")
        for position, (token, entry) in enumerate(zip(prompt[1:], others, strict=True)):
            found, row = entry.logprobs, want[position]
            assert found.chosen == pytest.approx(float(row[token]), abs=1e-4)
            assert list(found.top_logprobs) == pytest.approx(np.sort(row)[::-1][:top].tolist(), abs=1e-4)
            assert row[list(found.top_tokens)].tolist() == pytest.approx(list(found.top_logprobs), abs=1e-4)
            assert found.rank == pytest.approx(1 + sum(row > row[token]), abs=1)  # two may be nearly equal


@pytest.fixture(scope="module")
def scorer(directories: Directories) -> Scorer:
    return Scorer(directories.target)


@pytest.fixture(params=[False, True], ids=["tree", "paged"])
async def services(directories: Directories, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack(directories.target, directories.near, paged=request.param) as running:
        yield running


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, length]).integers(3, VOCABULARY, length)]


def in_chunks_of(rows: int, services: Stack) -> None:
    """Make the verifiers compute prompts in chunks."""
    for pod in services.verifiers:
        pod.loop._planner._prompts._prefill_rows = rows


def told(responses: list[generation_pb2.GenerateResponse]) -> list[generation_pb2.PromptToken]:
    return [entry for response in responses for entry in response.prompt]


async def test_they_are_transformers_with_a_cached_prefix_and_in_chunks(services: Stack, scorer: Scorer) -> None:
    prompt = prompt_of(200)
    before = await services.generate(prompt, max_tokens=8)
    scores: set[str] = set()
    for rows in (512, 50, 33):
        in_chunks_of(rows, services)
        answer = await services.complete(prompt, max_tokens=8, prompt_logprobs=TOP, logprobs=1)
        scorer.check(prompt, answer.prompt)
        scores.add(str(answer.prompt))
        (completion,) = answer.completions
        assert completion.tokens == before.tokens
        assert len(completion.logprobs) == 8
        assert completion.finish.usage.cached_tokens == 0
    assert len(scores) == 1  # equal bits
    assert (await services.generate(prompt, max_tokens=8)).finish.usage.cached_tokens > 100
    pieces = services.model.tokenizer.piece
    assert [entry.bytes for entry in answer.prompt] == [pieces(token) for token in prompt]
    assert list(answer.prompt[9].logprobs.top_bytes) == [pieces(t) for t in answer.prompt[9].logprobs.top_tokens]


async def test_many_at_once_beside_texts(services: Stack, scorer: Scorer) -> None:
    in_chunks_of(64, services)
    prompts = [prompt_of(150 - 20 * seed, seed) for seed in range(3)]
    texts = asyncio.gather(*(services.generate(prompt_of(5, seed), max_tokens=60) for seed in range(2)))
    answers = await asyncio.gather(*(services.complete(p, max_tokens=4, prompt_logprobs=TOP, n=2) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        scorer.check(prompt, answer.prompt)
        assert len(answer.completions) == 2
    await texts


async def test_nothing_is_generated_if_that_is_asked_for(services: Stack, scorer: Scorer) -> None:
    for length in (1, 2, 130):
        prompt = prompt_of(length)
        request = request_of(prompt, max_tokens=0, prompt_logprobs=TOP)
        responses = [response async for response in services.stub.Generate(request)]
        assert responses[0].HasField("resolved")
        assert responses[0].HasField("seed")
        assert not any(response.tokens for response in responses)
        scorer.check(prompt, told(responses))
        finish = responses[-1].finish
        assert finish.reason == model_pb2.FINISH_REASON_LENGTH
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (length, 0)
        assert finish.reproducible
    await until(lambda: services.idle)


async def test_a_prompt_of_one_token_begins_a_text(services: Stack) -> None:
    answer = await services.complete([50], max_tokens=5, prompt_logprobs=TOP)
    assert [(entry.token, entry.HasField("logprobs")) for entry in answer.prompt] == [(50, False)]
    assert answer.completions[0].tokens == (await services.generate([50], max_tokens=5)).tokens


@pytest.mark.parametrize("max_tokens", [0, 6])
async def test_every_position_comes_once_if_the_verifier_dies(
    directories: Directories, scorer: Scorer, max_tokens: int
) -> None:
    prompt = prompt_of(220)
    fields: dict[str, Any] = {"max_tokens": max_tokens, "prompt_logprobs": TOP, "ignore_end_token": True}
    async with stack(directories.target, None, verifiers=2, target_delay=long_steps) as services:
        in_chunks_of(20, services)
        coming = aiter(services.stub.Generate(request_of(prompt, **fields)))
        responses = [await anext(coming)]
        (serving,) = (pod for pod in services.verifiers if pod.loop.stats.running)
        await serving.stop()
        responses += [response async for response in coming]
        assert 0 < len(responses[0].prompt) < 100
        scorer.check(prompt, told(responses))
        finish = responses[-1].finish
        assert dict(finish.speculation.failover_events) == {"verifier_lost": 1}
        assert finish.usage.completion_tokens == max_tokens
        await until(lambda: services.idle)
