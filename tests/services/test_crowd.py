"""A request's tokens do not depend on the requests that share its steps, memory or prefixes.

Many concurrent requests of mixed lengths and samplings run in a memory too small for them, so that they queue and are
preempted. Some have a common prefix, some are cancelled. They are compared with the same requests run alone, plain,
with enough memory. With exact numerics not one token may differ, in bfloat16 as in float32.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from demo.prompts import held_out
from specdec.engine.processor import computes_bfloat16
from specdec.local import DEMO
from specdec.v2 import generation_pb2, model_pb2
from tests.margins import Oracle
from tests.models import CONTEXT, VOCABULARY
from tests.services.conftest import Directories
from tests.services.test_equality import SAMPLINGS, sampler
from tests.services.test_transformers import onnx
from tests.stack import Stack, request_of, stack, until


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    sampling: dict[str, Any]
    tokens: int
    read: int  # cancelled after this number of tokens, if there are more

    def request(self, **fields: Any) -> generation_pb2.GenerateRequest:
        return request_of(
            self.prompt, sampling=dict(self.sampling), max_tokens=self.tokens, ignore_end_token=True, **fields
        )


def asks(count: int, texts: list[list[int]], longest: int, seed: int) -> list[Ask]:
    """Return requests: half begin with one common text, a sixth are cancelled."""
    generator = random.Random(seed)
    made = []
    for index in range(count):
        own = texts[1 + index % (len(texts) - 1)]
        own = own[: generator.randrange(1, len(own) + 1)]
        prompt = texts[0] + own if index % 2 else own
        tokens = generator.randrange(longest // 4, longest + 1)
        cancelled = generator.random() < 1 / 6
        made.append(Ask(prompt, SAMPLINGS[index % len(SAMPLINGS)], tokens, tokens // 2 if cancelled else tokens))
    return made


async def tokens_of(services: Stack, ask: Ask, **fields: Any) -> tuple[list[int], generation_pb2.Finish]:
    call = services.stub.Generate(ask.request(**fields))
    tokens: list[int] = []
    finish = generation_pb2.Finish()
    async for response in call:
        tokens += response.tokens
        finish = response.finish
        if len(tokens) >= ask.read and not response.HasField("finish"):
            call.cancel()
            break
    return tokens, finish


@dataclass
class Outcome:
    """Runs of the same requests, alone and concurrently."""

    exact: bool
    preemptions: int
    found: int
    accepted: int
    pairs: list[tuple[Ask, list[int], list[int]]]

    @property
    def compared(self) -> int:
        return sum(len(got) for _, _, got in self.pairs)

    def check(self, oracle: Oracle) -> None:
        """With exact numerics the runs are equal. Otherwise they diverge at near ties only, and each tie is printed."""
        for number, (ask, alone, crowd) in enumerate(self.pairs):
            what = f"request {number}, {ask.sampling}"
            if self.exact:
                assert len(crowd) >= min(ask.read, len(alone)), what  # a cancelled one may have read more
                assert crowd == alone[: len(crowd)], what
            else:
                oracle.same(ask.prompt, alone[: len(crowd)], crowd, sampler(ask.sampling), what)


async def run(requests: list[Ask], target: Path, draft: Path, small: int, **options: Any) -> Outcome:
    """Run all requests both ways; `small` is the memory of the concurrent run, in slots."""
    async with stack(target, None, **options | {"draft_engine": None}) as services:
        alone = [(await tokens_of(services, replace(ask, read=ask.tokens), plain=True))[0] for ask in requests]
    async with stack(target, draft, **options | {"capacity": small}) as services:
        answers = await asyncio.gather(*(tokens_of(services, ask) for ask in requests))
        load = services.verifier_loop.stats
        await until(lambda: services.verifier_loop.pool.held == 0)
    finishes = [finish for _, finish in answers if finish.reason]
    return Outcome(
        exact=all(f.numerics_mode == model_pb2.NUMERICS_MODE_EXACT for f in finishes),
        preemptions=load.preemptions,
        found=load.cached_tokens,
        accepted=load.accepted,
        pairs=[(ask, a, tokens) for ask, a, (tokens, _) in zip(requests, alone, answers, strict=True)],
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.verify)])
async def test_many_at_once_change_no_token(directories: Directories, dtype: str) -> None:
    generator = random.Random(8)
    texts = [[generator.randrange(3, VOCABULARY) for _ in range(70)] for _ in range(9)]
    requests = asks(24, texts, CONTEXT - 150, seed=1)
    outcome = await run(requests, directories.target, directories.near, small=256 + 64 * 12, dtype=dtype)
    assert outcome.preemptions > 0
    assert outcome.found > 0
    if dtype == "bfloat16" and not outcome.exact:
        pytest.skip("rows depend on their batch on this machine, and bfloat16 has no margins to go by")
    outcome.check(directories.oracle)


@pytest.mark.verify
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_64_at_once_change_no_token(directories: Directories, dtype: str) -> None:
    """100,000 tokens in all: of tiny models for speed, and of the demo pair if the processor computes the dtype
    natively (otherwise the pair takes most of an hour)."""
    compared = preemptions = accepted = ties = 0
    exact = True
    slow = dtype == "bfloat16" and not computes_bfloat16()
    tiny, demo = (23, 0) if slow else (15, 2)
    for number in range(tiny + demo):
        generator = random.Random(number)
        if number < tiny:
            target, draft, small = directories.target, directories.near, 256 + 64 * 24
            texts = [[generator.randrange(3, VOCABULARY) for _ in range(60)] for _ in range(30)]
            requests, options = asks(64, texts, CONTEXT - 125, seed=number), {}
        else:
            target, draft, small = DEMO / "target", DEMO / "draft", 256 + 64 * 100
            requests = asks(64, held_out(40, tokens=160, seed=number), 480, seed=number)
            options = {"draft_engine": onnx, "capacity": 64 * 1000}
        oracle = Oracle(target)
        outcome = await run(requests, target, draft, small=small, dtype=dtype, **options)
        outcome.check(oracle)
        compared += outcome.compared
        preemptions += outcome.preemptions
        accepted += outcome.accepted
        ties += len(oracle.ties)
        exact = exact and outcome.exact
        print(f"{dtype}, exact {exact}: {compared} tokens, {ties} ties, {preemptions} preemptions", flush=True)
    assert compared > 100_000
    assert preemptions > 0
    assert accepted > 0


@pytest.mark.verify
async def test_fast_numerics_part_at_near_ties_only() -> None:
    oracle = Oracle(DEMO / "target")
    requests = asks(64, held_out(40, tokens=160, seed=1), 480, seed=1)
    outcome = await run(
        requests,
        DEMO / "target",
        DEMO / "draft",
        small=256 + 64 * 100,
        capacity=64 * 1000,
        draft_engine=onnx,
        exact=False,
    )
    assert not outcome.exact
    outcome.check(oracle)
    print(f"fast: {outcome.compared} tokens, {len(oracle.ties)} partings")
