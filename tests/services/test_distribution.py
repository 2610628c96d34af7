"""Sampling through a whole speculative run follows the target's own distribution.

Under COUPLED and REJECTION. A chi-square test of the joint distribution of the first three tokens against the
probabilities that the model's own forward gives. The false-alarm probability is FALSE_ALARM; the seeds are fixed,
so the outcome is too.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from scipy import stats

from specdec.v1 import generation_pb2, model_pb2
from tests.services.conftest import Directories
from tests.stack import request_of, stack

FALSE_ALARM = 1e-6
PROMPT = [50, 60, 70, 80, 90]
KEPT = 4
TEMPERATURE = 1.5
REQUESTS, SAMPLES = 150, 16
LEAST_EXPECTED = 8.0


def expected(directories: Directories) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of three tokens under temperature and top-k."""
    result: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in result.items():
            z = directories.oracle.logits([*PROMPT, *path]).astype(np.float64) / TEMPERATURE
            kept = np.argsort(-z, kind="stable")[:KEPT]
            weights = np.exp(z[kept] - z[kept].max())
            for token, weight in zip(kept.tolist(), weights / weights.sum(), strict=True):
                longer[(*path, token)] = probability * float(weight)
        result = longer
    return result


@pytest.mark.parametrize("rule", ["COUPLED", "REJECTION"])
async def test_sampled_tokens_follow_the_target(directories: Directories, rule: str) -> None:
    want = expected(directories)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(want, 0)
    sources: list[int] = []
    async with stack(directories.target, directories.near, target_delay=lambda: time.sleep(0.015)) as services:
        for seed in range(REQUESTS):
            sampling = {"temperature": TEMPERATURE, "top_k": KEPT, "seed": seed}
            fields = {"max_tokens": 3, "n": SAMPLES, "ignore_end_token": True, "rule": f"ACCEPTANCE_RULE_{rule}"}
            request = request_of(PROMPT, sampling=sampling, **fields)
            answer = await services.stub.Complete(generation_pb2.CompleteRequest(request=request))
            for completion in answer.completions:
                counts[tuple(completion.tokens)] += 1
                sources += completion.sources
    drafted = sources.count(model_pb2.TOKEN_SOURCE_DRAFT)
    corrected = sources.count(model_pb2.TOKEN_SOURCE_CORRECTION)
    assert drafted > 100  # a part of what is tested was drafted,
    assert corrected > 30  # and a part corrected
    total = REQUESTS * SAMPLES
    assert sum(counts.values()) == total
    paths = sorted(want, key=lambda path: -want[path])
    common = list(itertools.takewhile(lambda path: total * want[path] >= LEAST_EXPECTED, paths))
    rare = paths[len(common) :]
    cells = [[path] for path in common] + ([rare] if rare else [])
    observed = [sum(counts[path] for path in cell) for cell in cells]
    wanted = [total * sum(want[path] for path in cell) for cell in cells]
    assert len(observed) > 10
    pvalue = stats.chisquare(observed, np.asarray(wanted) * (total / sum(wanted))).pvalue
    assert pvalue > FALSE_ALARM
