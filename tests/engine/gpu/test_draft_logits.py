"""Shortlists made on a GPU equal those of the host, and reveal broken rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.decoding.candidates import QueriedRow, draft_candidates
from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, HostDraftLogits, shortlists
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.gpu.draft_logits import GpuDraftLogits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocabulary", [40, 1000])
def test_equal_logits_are_in_order_and_broken_ones_first(vocabulary: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (6, vocabulary)).astype(np.float32)
    logits[:, 3::7] = logits[:, 3:4]
    logits[1, 5:] = -np.inf
    logits[2, 9] = np.nan
    logits[3, 9] = -np.nan
    logits[4, 9] = np.inf
    logits[5, [8, 20]] = 40.0
    got = GpuDraftLogits(torch.from_numpy(logits).to(DEVICE)).shortlists(range(6))
    want = shortlists(list(logits))
    assert got.ids.shape[1] == min(vocabulary, MAX_DRAFT_LOGITS)
    finite = want.values > want.values[:, -1:]  # any of the ids tied with the last entry may be listed
    np.testing.assert_array_equal(got.values, want.values)
    np.testing.assert_array_equal(got.ids[finite], want.ids[finite])


def test_candidates_are_those_of_rows_in_memory() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(0, 3, (8, 900)).astype(np.float32)
    samplings = [Sampling(), Sampling(temperature=0.8, top_p=0.95), Sampling(temperature=1.0, logit_bias={5: 9.0})]
    rows = [QueriedRow(at, SamplingQuery(RequestSampler(samplings[at % 3]), at), 900 - at) for at in range(8)]
    want = draft_candidates(HostDraftLogits(logits), rows, 4)
    got = draft_candidates(GpuDraftLogits(torch.from_numpy(logits).to(DEVICE)), rows, 4)
    for part, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_whole_rows_are_fetched_once() -> None:
    logits = np.random.default_rng(2).normal(0, 3, (5, 300)).astype(np.float32)
    got = GpuDraftLogits(torch.from_numpy(logits).to(DEVICE))
    first = got.whole([3, 1])
    np.testing.assert_array_equal(first, logits[[3, 1]])
    again = got.whole([1, 4, 1])
    np.testing.assert_array_equal(again, logits[[1, 4, 1]])
    assert again[0] is first[1]
    assert got.whole([]) == []
    assert len(got.shortlists([]).ids) == 0
