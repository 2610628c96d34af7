"""The other acceptance rules through the whole system. (`test_distribution.py` tests that REJECTION follows the
target's distribution.)"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from typing import Any

import grpc
import numpy as np
import pytest

from specdec.client.errors import from_rpc
from specdec.decoding.choice import choose
from specdec.decoding.contrastive import amateur_distribution
from specdec.decoding.noise import sample_seed
from specdec.decoding.proposal import Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Contrast, Rule, Sampling, Typicality
from specdec.decoding.typical import threshold
from specdec.v2 import generation_pb2, model_pb2
from tests.margins import Oracle
from tests.services.conftest import Directories
from tests.services.test_faults import rest_of
from tests.stack import ALWAYS, Stack, request_of, stack, until

CONTRASTIVE = model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
REJECTION = model_pb2.ACCEPTANCE_RULE_REJECTION
TYPICAL = model_pb2.ACCEPTANCE_RULE_TYPICAL
PROMPT = [50, 60, 70, 80, 90]
TOKENS = 24


def slow_target() -> None:
    """Make steps slow enough for candidates to arrive, even on a busy machine."""
    time.sleep(0.02)


CONTRAST_MARGIN = 0.01
"""Logits that differ in their last bits may round to different float16 numbers, up to 2**-6 apart for log-probabilities
of -16 and below; two scores closer than this may swap.
"""


class Reference:
    """Contrastive decoding in this process: both models' own forward passes, one token at a time."""

    def __init__(self, target: Oracle, draft: Oracle, contrast: Contrast) -> None:
        self.target, self.draft = target, draft
        self.sampler = RequestSampler(Sampling(), rule=Rule.CONTRASTIVE, contrast=contrast)

    def next(self, text: list[int]) -> tuple[int, float]:
        """Return the next token and its margin over the second best."""
        z = self.target.logits(text)
        row = amateur_distribution(self.draft.logits(text), self.sampler.contrast)
        token = int(choose(z[None], [SamplingQuery(self.sampler, len(text), proposal=Proposal((), row))])[0])
        plausible = z >= z.max() + math.log(self.sampler.contrast.alpha)
        scores = np.sort((z - row.values.astype(np.float64))[plausible])
        return token, float(scores[-1] - scores[-2]) if len(scores) > 1 else math.inf

    def check(self, prompt: list[int], tokens: list[int]) -> int:
        """Return the number of ties; raise AssertionError if the text breaks the rule other than at a tie. After a tie
        the check goes on with the text's own token.
        """
        ties = 0
        for at, token in enumerate(tokens):
            want, margin = self.next(prompt + tokens[:at])
            if token != want:
                assert margin < CONTRAST_MARGIN, f"token {at} is {token}, {want} expected; margin {margin:.2e}"
                ties += 1
        return ties


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(2)
    return [[generator.randrange(3, 256) for _ in range(generator.choice((3, 9, 40)))] for _ in range(count)]


async def compare(directories: Directories, texts: list[list[int]], contrast: Contrast) -> None:
    reference = Reference(directories.oracle, Oracle(directories.near), contrast)
    message = model_pb2.Contrast(alpha=contrast.alpha, amateur_temperature=contrast.amateur_temperature)
    ties = accepted = 0
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        for prompt in texts:
            answer = await services.generate(
                prompt, rule=CONTRASTIVE, contrast=message, max_tokens=TOKENS, ignore_end_token=True
            )
            assert len(answer.tokens) == TOKENS
            assert not answer.finish.reproducible
            ties += reference.check(prompt, list(answer.tokens))
            accepted += answer.finish.speculation.accepted
        await until(lambda: services.verifier_loop.pool.held == 0)
    compared = len(texts) * TOKENS
    print(f"{compared} tokens compared, {ties} ties, {accepted} of the tokens drafted")
    assert accepted > 0
    assert ties <= 0.01 * compared


@pytest.mark.parametrize("contrast", [Contrast(), Contrast(alpha=0.3, amateur_temperature=0.5)], ids=str)
async def test_contrastive_tokens_are_those_of_the_reference(directories: Directories, contrast: Contrast) -> None:
    await compare(directories, prompts(4)[2:], contrast)


@pytest.mark.verify
async def test_contrastive_tokens_of_50_prompts(directories: Directories) -> None:
    await compare(directories, prompts(50), Contrast())


async def test_contrast_makes_a_difference(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        greedy = await services.generate(PROMPT, max_tokens=TOKENS, ignore_end_token=True)
        other = await services.generate(PROMPT, max_tokens=TOKENS, ignore_end_token=True, rule=CONTRASTIVE)
    assert list(greedy.tokens) != list(other.tokens)


@pytest.mark.parametrize("drafted", [True, False], ids=["lost", "none"])
async def test_contrast_needs_a_draft(directories: Directories, drafted: bool) -> None:
    """Without a draft the request ends with UNAVAILABLE, after the tokens already sent."""
    async with stack(
        directories.target,
        directories.near if drafted else None,
        delay=lambda: time.sleep(0.01),
        failover_seconds=0.5,
    ) as services:
        call = services.stub.Generate(request_of(PROMPT, max_tokens=200, ignore_end_token=True, rule=CONTRASTIVE))
        if drafted:
            assert (await call.read()).tokens
            assert services.draft_server is not None
            await services.draft_server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await rest_of(call)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc(lost.value).reason == "DRAFT_REQUIRED"
        await until(lambda: services.verifier_loop.pool.held == 0)


async def test_waiting_for_a_draft_holds_up_nobody_else(directories: Directories) -> None:
    """Contrastive sessions skip steps while their draft is silent; other sessions proceed."""
    async with stack(directories.target, directories.near, delay=lambda: time.sleep(0.2)) as services:
        slow = services.stub.Generate(request_of(PROMPT, max_tokens=100, ignore_end_token=True, rule=CONTRASTIVE))
        assert (await slow.read()).tokens
        begin = time.monotonic()
        plain = await services.generate(PROMPT, max_tokens=100, plain=True, ignore_end_token=True)
        assert len(plain.tokens) == 100
        assert time.monotonic() - begin < 100 * 0.2 / 2
        slow.cancel()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature"),
        ({"sampling": {"top_k": 3}}, "sampling.top_k"),
        ({"sampling": {"top_p": 0.5}}, "sampling.top_p"),
        ({"sampling": {"min_p": 0.1}}, "sampling.min_p"),
        ({"sampling": {"typical_p": 0.5}}, "sampling.typical_p"),
        ({"contrast": {"alpha": 0.0}}, "contrast.alpha"),
        ({"contrast": {"alpha": 1.5}}, "contrast.alpha"),
        ({"contrast": {"amateur_temperature": -1.0}}, "contrast.amateur_temperature"),
        ({"plain": True}, "speculation.off"),
        ({"rule": REJECTION, "contrast": {"alpha": 0.5}}, "contrast"),
        ({"typicality": {"typical_delta": 0.5}}, "typicality"),
        ({"rule": TYPICAL, "typicality": {"typical_epsilon": 0.0}}, "typicality.typical_epsilon"),
        ({"rule": TYPICAL, "typicality": {"typical_epsilon": 1.5}}, "typicality.typical_epsilon"),
        ({"rule": TYPICAL, "typicality": {"typical_delta": -1.0}}, "typicality.typical_delta"),
    ],
)
async def test_what_does_not_go_together_is_refused(
    directories: Directories, fields: dict[str, Any], field: str
) -> None:
    async with stack(directories.target, None) as services:
        with pytest.raises(grpc.aio.AioRpcError, match=field.replace(".", r"\.")) as refused:
            await services.generate(PROMPT, max_tokens=3, **({"rule": CONTRASTIVE} | fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def rejected(services: Stack, tokens: int = 60, **fields: Any) -> generation_pb2.Completion:
    return await services.generate(PROMPT, rule=REJECTION, max_tokens=tokens, ignore_end_token=True, **fields)


async def rejected_until(
    services: Stack, accepted: int, declined: int, tokens: int = 60, **limits: Any
) -> tuple[list[generation_pb2.Completion], Counter[str]]:
    """Send requests with consecutive seeds until `accepted` candidates were accepted and `declined` were not: on a busy
    machine drafts are late, and there is little to accept. Return the completions and their summed counts."""
    texts: list[generation_pb2.Completion] = []
    total: Counter[str] = Counter()
    async with asyncio.timeout(120):
        while total["accepted"] < accepted or total["offered"] - total["accepted"] < declined:
            sampling = {"temperature": 1.0, "seed": 3 + len(texts), **limits}
            texts.append(await rejected(services, tokens, sampling=sampling))
            found = texts[-1].finish.speculation
            total += Counter(accepted=found.accepted, offered=found.offered, corrections=found.sources["correction"])
    return texts, total


async def test_rejection_without_temperature_is_greedy(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, max_tokens=TOKENS, plain=True, ignore_end_token=True)
        got = await rejected(services, TOKENS, speculation=ALWAYS)
        directories.oracle.same(PROMPT, list(want.tokens), list(got.tokens), RequestSampler(Sampling()))
        assert got.finish.reproducible


async def test_rejection_accepts_and_rejects(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        texts, _ = await rejected_until(services, 10, 1, TOKENS)
    assert not any(each.finish.reproducible for each in texts)


async def test_a_draft_equal_to_the_target_is_always_accepted(directories: Directories) -> None:
    """Except for losses by rounding to float16."""
    async with stack(directories.target, directories.target, target_delay=slow_target) as services:
        texts, total = await rejected_until(services, 21, 0, top_k=40)
    assert total["corrections"] <= len(texts)


async def test_rejection_goes_on_without_its_draft(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        assert services.draft_server is not None
        request = request_of(
            PROMPT,
            rule=REJECTION,
            max_tokens=100,
            ignore_end_token=True,
            sampling={"temperature": 1.0, "seed": 3},
            speculation=ALWAYS,
        )
        call = services.stub.Generate(request)
        responses: list[generation_pb2.GenerateResponse] = [await call.read()]
        while model_pb2.TOKEN_SOURCE_REMOTE_DRAFT not in responses[-1].sources:
            responses.append(await call.read())
        await services.draft_server.stop(None)
        responses += await rest_of(call)
    assert sum(len(r.tokens) for r in responses) == 100
    assert responses[-1].finish.speculation.undrafted_reason == "draft_lost"


# --- TYPICAL ----------------------------------------------------------------------------------------


async def test_typical_tokens_are_chosen_or_typical(directories: Directories) -> None:
    """Each token is the target's own choice, or exceeds the threshold of the target's distribution there; the draft
    guesses as under COUPLED. With a low threshold nearly all guesses are accepted."""
    oracle = directories.oracle
    sampling, others, accepted = {"temperature": 1.0, "seed": 4}, 0, 0
    coupled = RequestSampler(Sampling(temperature=1.0, seed=sample_seed(4, 0)))
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        for first in range(3):
            prompt = [*PROMPT, 20 + first]
            found = await services.generate(
                prompt,
                sampling=sampling,
                rule=TYPICAL,
                typicality={"typical_epsilon": 0.02, "typical_delta": 0.2},
                max_tokens=60,
                ignore_end_token=True,
                speculation=ALWAYS,
            )
            assert not found.finish.reproducible
            accepted += found.finish.speculation.accepted
            text = list(prompt)
            for token in found.tokens:
                z = oracle.logits(text)
                own = int(choose(z[None], [SamplingQuery(coupled, len(text))])[0])
                weights = np.exp((z - z.max()).astype(np.float64))
                p = weights / weights.sum()
                if token != own:
                    others += 1
                    assert p[token] > threshold(p, Typicality(0.02, 0.2)) - CONTRAST_MARGIN / len(p)
                text.append(token)
    assert 0 < others < accepted


async def test_without_drafts_or_temperature_typical_is_coupled(directories: Directories) -> None:
    sampling = {"temperature": 0.9, "seed": 7}
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, sampling=sampling, max_tokens=TOKENS, plain=True)
        got = await services.generate(PROMPT, sampling=sampling, max_tokens=TOKENS, plain=True, rule=TYPICAL)
        assert list(got.tokens) == list(want.tokens)
        greedy = await services.generate(PROMPT, max_tokens=TOKENS, plain=True)
        few = {"typical_delta": 0.5}
        typical = await services.generate(PROMPT, max_tokens=TOKENS, rule=TYPICAL, typicality=few, speculation=ALWAYS)
        directories.oracle.same(PROMPT, list(greedy.tokens), list(typical.tokens), RequestSampler(Sampling()))
        assert typical.finish.reproducible
