"""Sampling through a whole speculative run follows the target's own distribution.

Under COUPLED and REJECTION, a chi-square test compares the joint distribution of the first three tokens with the
probabilities of the model's own forward pass. The false-alarm probability is FALSE_ALARM; the seeds are fixed, so the
outcome is too. As a negative control, the same counts must not fit another temperature.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specdec.v2 import generation_pb2, model_pb2
from tests.models import VOCABULARY
from tests.services.conftest import Directories
from tests.stack import ALWAYS, Stack, request_of, stack
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode

FALSE_ALARM = 1e-6
PROMPT = [50, 60, 70, 80, 90]
KEPT = 4
TEMPERATURE, OTHER_TEMPERATURE = 1.5, 0.75
REQUESTS, SAMPLES = 30, 16
MIN_EXPECTED = 8.0
LOOKAHEAD = generation_pb2.Speculation(lookahead=model_pb2.Lookahead(window=2, ngram=3, guesses=2))
"""Applied whether or not it pays."""


Distribution = dict[tuple[int, ...], float]
"""Probabilities of sequences of three tokens."""


def expected(
    directories: Directories, prompt: list[int], temperature: float, banned: Sequence[int] = ()
) -> Distribution:
    """Return the target's distribution under this temperature and top-k."""
    result: Distribution = {(): 1.0}
    for _ in range(3):
        longer: Distribution = {}
        for path, probability in result.items():
            z = directories.oracle.logits([*prompt, *path]).astype(np.float64) / temperature
            z[list(banned)] = -np.inf
            kept = np.argsort(-z, kind="stable")[:KEPT]
            weights = np.exp(z[kept] - z[kept].max())
            for token, weight in zip(kept.tolist(), weights / weights.sum(), strict=True):
                longer[(*path, token)] = probability * float(weight)
        result = longer
    return result


@pytest.mark.parametrize(
    ("rule", "options", "tree"),
    [
        pytest.param("COUPLED", {}, {}, id="COUPLED", marks=pytest.mark.verify),
        pytest.param("REJECTION", {}, {}, id="REJECTION"),
        pytest.param("REJECTION", {"block_verification": False}, {}, id="REJECTION-token", marks=pytest.mark.verify),
        pytest.param("REJECTION", {}, {"max_branches": 3}, id="REJECTION-siblings", marks=pytest.mark.verify),
        pytest.param("REJECTION", {}, {"expansion": [1, 3, 1]}, id="REJECTION-fixed", marks=pytest.mark.verify),
    ],
)
async def test_sampled_tokens_follow_the_target(
    directories: Directories, rule: str, options: dict[str, Any], tree: dict[str, Any]
) -> None:
    speculation = generation_pb2.Speculation(**tree)
    speculation.MergeFrom(ALWAYS)
    async with stack(
        directories.target, directories.near, target_delay=lambda: time.sleep(0.04), **options
    ) as services:
        sources = await check(services, directories, PROMPT, rule, speculation)
    assert sources[model_pb2.TOKEN_SOURCE_REMOTE_DRAFT] > 15  # some of the tested tokens were drafted,
    assert sources[model_pb2.TOKEN_SOURCE_CORRECTION] > 5  # and some corrected


@pytest.mark.parametrize("rule", ["COUPLED", "REJECTION"])
@pytest.mark.verify
async def test_they_do_with_a_draft_of_the_verifiers_own(directories: Directories, rule: str) -> None:
    options: dict[str, Any] = {"draft_model": directories.near, "controller": Decided(Mode.LOCAL_DRAFT)}
    async with stack(directories.target, None, target_delay=lambda: time.sleep(0.04), **options) as services:
        sources = await check(services, directories, PROMPT, rule)
    assert sources[model_pb2.TOKEN_SOURCE_LOCAL_MODEL] > 15
    assert sources[model_pb2.TOKEN_SOURCE_CORRECTION] > 5


async def test_guesses_that_nobody_drew_leave_the_distribution_as_it_is(directories: Directories) -> None:
    """Under REJECTION, without a draft: n-grams offer, with probability 1, the token that followed last time. With a
    small vocabulary every text repeats itself."""
    words = range(50, 56)
    banned = [token for token in range(VOCABULARY) if token not in words]
    prompt = random.Random(1).choices(words, k=40)
    async with stack(directories.target, None) as services:
        sources = await check(services, directories, prompt, "REJECTION", LOOKAHEAD, banned)
    assert sources[model_pb2.TOKEN_SOURCE_NGRAM] > 30
    assert sources[model_pb2.TOKEN_SOURCE_CORRECTION] > 10


async def check(
    services: Stack,
    directories: Directories,
    prompt: list[int],
    rule: str,
    speculation: generation_pb2.Speculation | None = None,
    banned: Sequence[int] = (),
) -> Counter[model_pb2.TokenSource.ValueType]:
    """Test many samples; return the counts of their token sources."""
    want, other = (expected(directories, prompt, each, banned) for each in (TEMPERATURE, OTHER_TEMPERATURE))
    counts: dict[tuple[int, ...], int] = dict.fromkeys(want, 0)
    sources: Counter[model_pb2.TokenSource.ValueType] = Counter()
    for seed in range(REQUESTS):
        sampling = {"temperature": TEMPERATURE, "top_k": KEPT, "seed": seed, "banned_tokens": banned}
        fields: dict[str, Any] = {"speculation": speculation} if speculation else {}
        fields |= {"max_tokens": 3, "n": SAMPLES, "ignore_end_token": True, "rule": f"ACCEPTANCE_RULE_{rule}"}
        request = request_of(prompt, sampling=sampling, **fields)
        answer = await services.stub.Complete(generation_pb2.CompleteRequest(request=request))
        for completion in answer.completions:
            counts[tuple(completion.tokens)] += 1
            sources.update(completion.sources)
    assert sum(counts.values()) == REQUESTS * SAMPLES
    assert len(cells_of(want)) > 10
    assert pvalue(counts, want) > FALSE_ALARM > pvalue(counts, other)
    return sources


def cells_of(want: Distribution) -> list[list[tuple[int, ...]]]:
    """Return the cells of a chi-square test: sequences expected less than MIN_EXPECTED times are one cell."""
    paths = sorted(want, key=lambda path: -want[path])
    common = list(itertools.takewhile(lambda path: REQUESTS * SAMPLES * want[path] >= MIN_EXPECTED, paths))
    rare = paths[len(common) :]
    return [[path] for path in common] + ([rare] if rare else [])


def pvalue(counts: Mapping[tuple[int, ...], int], want: Distribution) -> float:
    """Return the p-value of a chi-square test of the counts."""
    total, cells = sum(counts.values()), cells_of(want)
    observed = [sum(counts[path] for path in cell) for cell in cells]
    wanted = [total * sum(want[path] for path in cell) for cell in cells]
    return float(stats.chisquare(observed, np.asarray(wanted) * (total / sum(wanted))).pvalue)
