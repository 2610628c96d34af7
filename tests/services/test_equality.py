"""Promise 1: speculation never changes a token.

Every request runs plain and then in each other way: drafted well, badly, slowly, by another model, alone and batched
with others, resumed from every position. All must give the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.client import build_request
from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.v2 import generation_pb2, model_pb2
from tests.models import CONTEXT, END, VOCABULARY
from tests.services.conftest import Directories
from tests.stack import ALWAYS, Stack, long_steps, stack, until
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode

TEMPERATURES = (0.0, 0.7, 1.0)
TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 12},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
)
SAMPLINGS: list[dict[str, Any]] = [
    *(
        {"temperature": temperature, "seed": 17 + number, **truncation}
        for number, (temperature, truncation) in enumerate(itertools.product(TEMPERATURES, TRUNCATIONS))
    ),
    {"temperature": 1.0, "seed": 5, "typical_p": 0.9},
]
SHORTLIST = [at for at, sampling in enumerate(SAMPLINGS) if sampling["temperature"] == 1.0 or at in (0, 3, 6)]
"""Indices of samplings with every truncation and every temperature; top_p and top_k do not change greedy text."""

KINDS = [SAMPLINGS[0], SAMPLINGS[11], *(pytest.param(SAMPLINGS[at], marks=pytest.mark.verify) for at in (5, 8))]
"""Greedy and penalised text, and in `make verify` others."""


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Return prompts of mixed lengths, some longer than a prefill chunk."""
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCABULARY) for _ in range(generator.choice((1, 5, 30, 90)))] for _ in range(count)]


LOOKING = [
    build_request(speculation="lookahead", lookahead=(5, 3, 5)).speculation,
    build_request(speculation="local", lookahead=(7, 5, 3)).speculation,
    build_request(speculation="jacobi", jacobi=4).speculation,
    build_request(speculation="lookahead", forced=True).speculation,
]

SHAPES = [
    generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True, expansion=[3, 2, 1]),
    generation_pb2.Speculation(max_depth=1, max_nodes=20, scorer=model_pb2.DRAFT_SCORER_PROBABILITY, forced=True),
]

HEADS = model_pb2.DRAFTER_HEADS

PROMPT_OF_TEXT = list(range(40, 70))


def slow_target() -> None:
    """Make target steps longer than a draft's, so that there is something to verify."""
    time.sleep(0.004)


def sampler(sampling: dict[str, Any]) -> RequestSampler:
    """Return the sampler of sample 0 of a request with these fields."""
    return RequestSampler(Sampling(**(sampling | {"seed": sample_seed(sampling["seed"], 0)})))


async def run_all(
    services: Stack, requests: list[tuple[list[int], dict[str, Any]]], tokens: int, *, at_once: int = 8, **fields: Any
) -> tuple[list[list[int]], int, int]:
    """Return (tokens per request, candidates offered, candidates accepted), with `at_once` requests in flight."""
    completions: list[generation_pb2.Completion] = []
    for start in range(0, len(requests), at_once):
        part = requests[start : start + at_once]
        completions += await asyncio.gather(
            *(services.generate(prompt, sampling=sampling, max_tokens=tokens, **fields) for prompt, sampling in part)
        )
    return (
        [list(c.tokens) for c in completions],
        sum(c.finish.speculation.offered for c in completions),
        sum(c.finish.speculation.accepted for c in completions),
    )


async def check(
    directories: Directories, requests: list[tuple[list[int], dict[str, Any]]], tokens: int, *, lone: int = 1
) -> None:
    """Compare all ways of running these requests. With heads, all run together, and every `lone`-th one alone."""
    oracle = directories.oracle

    def compare(want: list[list[int]], got: list[list[int]], what: str, every: int = 1) -> None:
        for (prompt, sampling), a, b in zip(requests[::every], want[::every], got, strict=True):
            oracle.same(prompt, a, b, sampler(sampling), f"{what}, {sampling}")

    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        want, drafted, _ = await run_all(services, requests, tokens, at_once=1, plain=True)
        assert drafted == 0
        for shape in SHAPES:
            for _ in range(10):  # on a busy machine a draft may be late for all of these short texts
                got, drafted, _ = await run_all(services, requests, tokens, speculation=shape)
                compare(want, got, f"a token tree of {shape}")
                if drafted:
                    break
            assert drafted > 0
        alone, drafted, accepted = await run_all(services, requests, tokens, at_once=1, speculation=ALWAYS)
        compare(want, alone, "drafted")
        assert 0 < accepted < drafted  # it did speculate, and was corrected
        crowd, _, _ = await run_all(services, requests, tokens)
        compare(want, crowd, "8 at once")
        await until(lambda: services.verifier_loop.pool.held == 0)

    async def against(draft: Path | None, what: str, **options: Any) -> None:
        async with stack(directories.target, draft, **options) as services:
            got, _, _ = await run_all(services, requests, tokens)
            compare(want, got, what)

    await against(directories.near, "chains alone", target_delay=slow_target, paged=True)
    await against(directories.other, "another draft")
    await against(directories.random, "a random draft")
    await against(directories.near, "a slow draft", delay=lambda: time.sleep(0.05))
    await against(None, "no draft at all")
    async with stack(directories.target, None, target_delay=slow_target) as services:
        for looking in LOOKING:
            got, drafted, _ = await run_all(services, requests, tokens, speculation=looking)
            compare(want, got, f"{looking}")
            assert drafted > 0
    for own in (directories.near, directories.random):
        controller = Decided(Mode.LOCAL_DRAFT)
        async with stack(
            directories.target, None, draft_model=own, controller=controller, target_delay=slow_target
        ) as services:
            for at_once in (1, 8):
                got, drafted, accepted = await run_all(services, requests, tokens, at_once=at_once)
                compare(want, got, f"{own.name} as the verifier's own draft, {at_once} at once")
                assert 0 < accepted < drafted
    controller = Decided(Mode.LOCAL_DRAFT)
    by_heads = generation_pb2.Speculation(drafters=[HEADS])
    fed_ones = directories.eagle3, directories.dflash, directories.dspark, directories.mtp
    for heads in (directories.heads, *fed_ones):
        async with stack(directories.target, None, heads=heads, controller=controller) as services:
            for at_once, every in ((1, lone), (8, 1)):
                got, drafted, accepted = await run_all(
                    services, requests[::every], tokens, at_once=at_once, speculation=by_heads
                )
                compare(want, got, f"random {heads.name}, {at_once} at once", every)
                assert accepted < drafted
    in_time = 0
    for heads in fed_ones:
        fed: dict[str, Any] = {"draft_heads": heads, "target_delay": slow_target}
        async with stack(directories.target, directories.target, **fed) as services:
            for at_once, every in ((1, lone), (8, 1)):
                got, drafted, _ = await run_all(
                    services, requests[::every], tokens, at_once=at_once, speculation=ALWAYS
                )
                compare(want, got, f"random {heads.name} in a draft service, {at_once} at once", every)
                in_time += drafted
    assert in_time > 0  # of many texts at once, few or none


async def test_tokens_do_not_depend_on_drafting(directories: Directories) -> None:
    requests = list(zip(prompts(len(SAMPLINGS)), SAMPLINGS, strict=True))
    await check(directories, [requests[at] for at in SHORTLIST], tokens=24, lone=3)


@pytest.mark.verify
async def test_tokens_do_not_depend_on_drafting_at_length(directories: Directories) -> None:
    requests = list(itertools.product(prompts(6, seed=4), SAMPLINGS))
    await check(directories, requests, tokens=96)
    print(f"{directories.oracle.compared} tokens compared, {len(directories.oracle.ties)} ties")


@pytest.mark.parametrize(
    "sampling",
    [SAMPLINGS[0], pytest.param(SAMPLINGS[9], marks=pytest.mark.verify), SAMPLINGS[11]],
    ids=str,
)
async def test_a_text_resumes_from_every_position(directories: Directories, sampling: dict[str, Any]) -> None:
    (prompt,) = prompts(1, seed=5)
    prompt = [*prompt, *range(40, 60)]
    async with stack(directories.target, directories.near) as services:
        whole = await services.generate(prompt, sampling=sampling, max_tokens=20)
        tokens = list(whole.tokens)
        for cut in range(1, len(tokens)):
            rest = await services.generate(prompt, sampling=sampling, max_tokens=20, generated_tokens=tokens[:cut])
            directories.oracle.same(
                prompt, tokens, tokens[:cut] + list(rest.tokens), sampler(sampling), f"cut at {cut}"
            )
            assert rest.finish.usage.completion_tokens == len(tokens)


async def test_greedy_tokens_are_those_of_transformers(directories: Directories) -> None:
    oracle = directories.oracle
    async with stack(directories.target, directories.near) as services:
        for prompt in prompts(4, seed=0):
            want = oracle.greedy(prompt, 40, frozenset({END}))
            got = await services.generate(prompt, max_tokens=40)
            oracle.same(prompt, want, list(got.tokens), RequestSampler(Sampling()), "transformers")


async def test_a_text_may_fill_the_context(directories: Directories) -> None:
    prompt = list(range(3, 203))
    async with stack(directories.target, directories.near) as services:
        plain = await services.generate(
            prompt, sampling={"temperature": 1.0, "seed": 1}, plain=True, ignore_end_token=True
        )
        drafted = await services.generate(prompt, sampling={"temperature": 1.0, "seed": 1}, ignore_end_token=True)
    assert len(plain.tokens) == CONTEXT - len(prompt)
    directories.oracle.same(
        prompt, list(plain.tokens), list(drafted.tokens), sampler({"temperature": 1.0, "seed": 1}), "to the brim"
    )


@pytest.mark.parametrize("sampling", KINDS, ids=str)
async def test_a_draft_equal_to_the_target_is_never_corrected(
    directories: Directories, sampling: dict[str, Any]
) -> None:
    """This holds only if the draft's KV memory is right after every commit, re-rooting and catching up."""
    async with stack(directories.target, directories.target, target_delay=long_steps) as services:
        completion = await services.generate(
            PROMPT_OF_TEXT, sampling=sampling, max_tokens=100, ignore_end_token=True, speculation=ALWAYS
        )
    sources = completion.finish.speculation.sources
    assert sources.get("remote_draft", 0) > 20
    assert sources.get("correction", 0) == 0


@pytest.mark.parametrize("sampling", KINDS, ids=str)
async def test_a_local_draft_equal_to_the_target_proposes_nearly_all(
    directories: Directories, sampling: dict[str, Any]
) -> None:
    """This holds only if the draft's KV memory is right after every step."""
    options: dict[str, Any] = {"target_delay": long_steps, "controller": Decided(Mode.LOCAL_DRAFT)}
    async with stack(directories.target, None, draft_model=directories.target, **options) as services:
        completion = await services.generate(PROMPT_OF_TEXT, sampling=sampling, max_tokens=100, ignore_end_token=True)
    assert completion.finish.speculation.sources.get("local_model", 0) > 40
