"""Choices from logits on a device equal those from the same logits on the host. The device is the CPU if there is no
other: the code is the same."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.block_verification import ChainQuery
from specdec.decoding.contrastive import UNDECIDED
from specdec.decoding.proposal import DraftDistribution, Proposal
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.sampling import Contrast, Rule, Sampling
from specdec.decoding.step_logits import HostLogits
from specdec.decoding.typical import TypicalCandidate, TypicalQuery
from specdec.engine.gpu import shortlist
from specdec.engine.gpu.sampler import GpuLogits
from tests.choices import mask_of
from tests.samplings import samplings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[SamplingQuery]]:
    """Draw rows of logits, some broken or rounded until many are equal, and their queries."""
    vocabulary = draw(st.sampled_from([5, 60, 400]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    queries: list[SamplingQuery] = []
    rows: list[np.ndarray[Any, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        sampling = draw(samplings(vocabulary, top_k=st.just(0) | st.integers(1, 2 * vocabulary)))
        sampler = RequestSampler(sampling, end_tokens=frozenset({0}), first_end_position=draw(st.integers(0, 12)))
        penalty_state = PenaltyState(vocabulary, *random.integers(0, vocabulary, (2, 4)).tolist())
        for _ in range(draw(st.integers(1, 3))):
            path = random.integers(0, vocabulary, draw(st.integers(0, 3))).tolist()
            allowed = draw(st.none() | st.frozensets(st.integers(0, vocabulary - 1), min_size=1))
            mask = None if allowed is None else mask_of(allowed, vocabulary)
            ruled_out = draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))
            queries.append(
                SamplingQuery(sampler, 7 + len(path), penalty_state, path, allowed=mask, ruled_out=ruled_out)
            )
            row = random.normal(size=vocabulary).astype(np.float32) * draw(st.sampled_from([0.01, 1.0, 20.0]))
            if draw(st.booleans()):
                row = np.round(row)
            for broken in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 1e35]), max_size=1)):
                row[random.integers(vocabulary)] = broken
            rows.append(row)
    return np.stack(rows), queries


@settings(max_examples=150, deadline=None)
@given(step=steps(), ranked=st.sampled_from([4, 1024]), known=st.booleans())
def test_device_rows_choose_as_rows_in_memory(step: Any, ranked: int, known: bool) -> None:
    logits, queries = step
    every = list(range(len(queries)))
    want, sound = HostLogits(logits).choose(every, queries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortlist, "RANKED", ranked)  # too few for some rows
        on_device = GpuLogits(torch.from_numpy(logits).to(DEVICE), dict(enumerate(queries)) if known else {})
        got, got_sound = on_device.choose(every, queries)
    assert got.tolist() == want.tolist()
    assert got_sound.tolist() == sound.tolist()


def test_other_rules_are_decided_by_whole_rows() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    sampler = RequestSampler(Sampling(temperature=0.8, seed=3), rule=Rule.REJECTION)
    queries = [SamplingQuery(sampler, position, None, [], None) for position in range(3)]
    want, _ = HostLogits(logits).choose([0, 1, 2], queries)
    got, _ = GpuLogits(torch.from_numpy(logits).to(DEVICE), dict(enumerate(queries))).choose([0, 1, 2], queries)
    assert got.tolist() == want.tolist()


def test_rows_that_a_drafts_row_does_not_decide_are_the_same_here_and_in_memory() -> None:
    """A row may end with a logit of -inf, as of padding, and is sound nevertheless."""
    logits = np.zeros((3, 60), dtype=np.float32)
    logits[1:, 7] = 1.0
    logits[:, 59] = -np.inf
    logits[2] = np.nan
    row = DraftDistribution(np.array([7, 9]), np.array([-1.0, -2.0], np.float16), vocabulary=60)
    samplers = [RequestSampler(Sampling(), rule=Rule.CONTRASTIVE, contrast=Contrast(alpha)) for alpha in (0.1, 1, 0.1)]
    queries = [SamplingQuery(sampler, 3, proposal=Proposal((), row)) for sampler in samplers]
    on_device = GpuLogits(torch.from_numpy(logits).to(DEVICE), dict(enumerate(queries)))
    for rows in (on_device, HostLogits(logits)):
        tokens, sound = rows.choose([0, 1, 2], queries)
        assert (tokens[:2].tolist(), sound.tolist()) == ([UNDECIDED, 7], [True, True, False])
        (plausible,) = rows.plausible([0], queries[:1])
        assert plausible.tolist() == list(range(59))


def test_chains_of_draws_are_verified_by_whole_rows() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(6, 50)).astype(np.float32)
    row = DraftDistribution(np.arange(50), np.ones(50, np.float16))
    chains = []
    for seed, rows in enumerate(([4, 0, 2], [1, 5])):
        sampler = RequestSampler(Sampling(temperature=0.8, seed=seed), rule=Rule.REJECTION)
        queries = [
            SamplingQuery(sampler, 7 + i, proposal=Proposal((int(random.integers(50)),), row)) for i in range(len(rows))
        ]
        chains.append(ChainQuery(rows, queries))
    want = HostLogits(logits).verify_chains(chains)
    assert GpuLogits(torch.from_numpy(logits).to(DEVICE), {}).verify_chains(chains) == want


def test_typical_candidates_are_accepted_by_whole_rows() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(4, 50)).astype(np.float32)
    sampler = RequestSampler(Sampling(temperature=0.8), rule=Rule.TYPICAL)
    likely = [int(row.argmax()) for row in logits]
    candidates = [TypicalCandidate(0, likely[2], 1), TypicalCandidate(1, likely[3], None)]
    queries = [
        TypicalQuery([2, 3], [SamplingQuery(sampler, 7), SamplingQuery(sampler, 8)], candidates),
        TypicalQuery([0], [SamplingQuery(sampler, 9)], [TypicalCandidate(0, int(logits[0].argmin()), None)]),
    ]
    assert HostLogits(logits).accept_typical(queries) == [[likely[2], likely[3]], []]
    assert GpuLogits(torch.from_numpy(logits).to(DEVICE), {}).accept_typical(queries) == [[likely[2], likely[3]], []]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 80), st.sampled_from([3, 50, 400]), st.sampled_from([0.3, 8.0]), st.integers(0, 99))
def test_log_probabilities_are_those_in_memory(count: int, vocabulary: int, scale: float, seed: int) -> None:
    """Equal logits are ranked alike; sums may differ in their last bits."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=(80, vocabulary)) * scale).astype(np.float32)
    logits[:, 0] = -0.0
    rows, tokens = random.permutation(80)[:count].tolist(), random.integers(0, vocabulary, count)
    tops = random.integers(0, 6, count).tolist()
    want = HostLogits(logits).logprobs(rows, tokens, tops)
    got = GpuLogits(torch.from_numpy(logits).to(DEVICE), {}).logprobs(rows, tokens, tops)
    for a, b in zip(got, want, strict=True):
        assert (a.top_tokens, a.rank) == (b.top_tokens, b.rank)
        assert [a.chosen, *a.top_logprobs] == pytest.approx([b.chosen, *b.top_logprobs], abs=1e-5)


def test_a_broken_row_has_no_log_probability_and_disturbs_no_other() -> None:
    logits = torch.tensor([[0.0, 1.0], [np.nan, 1.0], [np.inf, 0.0], [-np.inf, -np.inf], [0.0, -np.inf]])
    got = GpuLogits(logits.to(DEVICE), {}).logprobs(list(range(5)), np.ones(5, dtype=np.int64), [1] * 5)
    assert [np.isnan(row.chosen) for row in got] == [False, True, True, True, False]
    assert got[4].chosen == -np.inf


def of_all_kinds() -> tuple[torch.Tensor, list[SamplingQuery]]:
    """Return logits and queries: one row for each kind of shortlist, with penalties."""
    logits = np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32)
    kinds = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_p=0.5, seed=2)]
    penalty_state = PenaltyState(5000, [1, 2], [3])
    more: dict[str, Any] = {"repetition_penalty": 1.1, "banned_tokens": frozenset({7})}
    queries = [SamplingQuery(RequestSampler(replace(sampling, **more)), 5, penalty_state, []) for sampling in kinds]
    return torch.from_numpy(logits).to(DEVICE), queries


def test_a_step_is_fetched_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, of all kinds, are known in advance."""
    fetched: list[int] = []
    cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        fetched.append(tensor.numel())
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    logits, queries = of_all_kinds()
    rows = GpuLogits(logits, dict(enumerate(queries)))
    rows.choose([0, 1], queries[:2])
    rows.choose([2], queries[2:])
    assert len(fetched) == 1
    assert fetched[0] < 3 * 5000 * 4


@pytest.mark.gpu
def test_a_step_waits_once() -> None:
    """All other work is queued while the device still computes the logits."""
    logits, queries = of_all_kinds()
    GpuLogits(logits, dict(enumerate(queries)))  # triggers lazy loading
    with warnings.catch_warnings(record=True) as told:  # torch also warns that this mode is a prototype
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            GpuLogits(logits, dict(enumerate(queries)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in told if "synchronizing CUDA" in str(each.message)]
    assert len(waits) == 1, waits
