"""Greedy tokens of the whole system equal those of transformers' `generate`, for every architecture."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import pytest

from demo.prompts import held_out
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.engine import Engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.first_use import exported
from specdec.local import DEMO
from tests.margins import Oracle
from tests.models import ARCHITECTURES, END, VOCABULARY, make, near
from tests.services.test_equality import SAMPLINGS, sampler
from tests.stack import ALWAYS, stack

GREEDY = RequestSampler(Sampling())
USUAL = {"llama", "gemma2"}
"""Architectures that every change must pass: the plainest, and the one that differs most from it."""


def onnx(directory: ModelDirectory) -> Engine:
    return OnnxEngine(ModelDirectory(exported(directory)), capacity=16384, threads=1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.verify]) for name in ARCHITECTURES]
)
async def test_greedy_tokens_of_every_architecture(name: str, tmp_path: Path) -> None:
    target = make(name, tmp_path / "target")
    draft = near(target, tmp_path / "draft", noise=0.05)
    oracle = Oracle(target)
    generator = random.Random(1)
    accepted = 0
    step_seconds = 0.004
    async with stack(target, draft, target_delay=lambda: time.sleep(step_seconds), patience_seconds=5.0) as services:
        for length in (64, 70, 100, 130):
            prompt = [generator.randrange(3, VOCABULARY) for _ in range(length)]
            want = oracle.greedy(prompt, 32, frozenset({END}))
            got = await services.generate(prompt, max_tokens=32, speculation=ALWAYS)
            oracle.same(prompt, want, list(got.tokens), GREEDY, name)
            accepted += got.finish.speculation.accepted
            if not accepted:  # with little CPU time the draft was late at every step
                step_seconds *= 4
    assert accepted > 0


@pytest.mark.verify
async def test_greedy_tokens_of_the_demo_pair() -> None:
    """100 prompts of held-out text, 64 tokens each, drafted by the ONNX engine."""
    oracle = Oracle(DEMO / "target")
    accepted = drafted = 0
    async with stack(DEMO / "target", DEMO / "draft", draft_engine=onnx, capacity=16384) as services:
        for prompt in held_out(100, tokens=80):
            want = oracle.greedy(prompt, 64, frozenset({0}))
            got = await services.generate(prompt, max_tokens=64)
            oracle.same(prompt, want, list(got.tokens), GREEDY, "demo pair")
            accepted += got.finish.speculation.accepted
            drafted += got.finish.speculation.offered
    print(f"{oracle.compared} tokens compared, {len(oracle.ties)} ties, {accepted} of {drafted} candidates accepted")
    assert accepted > 1000


@pytest.mark.verify
async def test_tokens_of_the_demo_pair_do_not_depend_on_drafting() -> None:
    """Drafted requests, 8 concurrently, are compared with plain ones, one by one; every sampling."""
    oracle = Oracle(DEMO / "target")
    requests = list(itertools.product(held_out(8, tokens=64, seed=3), SAMPLINGS))
    async with stack(DEMO / "target", DEMO / "draft", draft_engine=onnx, capacity=16384) as services:
        want = [
            list((await services.generate(p, sampling=s, max_tokens=64, ignore_end_token=True, plain=True)).tokens)
            for p, s in requests
        ]
        got: list[list[int]] = []
        for start in range(0, len(requests), 8):
            crowd = await asyncio.gather(
                *(
                    services.generate(p, sampling=s, max_tokens=64, ignore_end_token=True)
                    for p, s in requests[start : start + 8]
                )
            )
            got += [list(c.tokens) for c in crowd]
    for (prompt, sampling), a, b in zip(requests, want, got, strict=True):
        oracle.same(prompt, a, b, sampler(sampling), str(sampling))
    print(f"{oracle.compared} tokens compared, {len(oracle.ties)} ties")
