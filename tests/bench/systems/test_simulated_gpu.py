"""Simulated devices: pass durations, and sampling on the host as with a GPU's logits."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bench.systems.pod import FAR, RANKS
from bench.systems.profiles import PROFILES, Profile, Times
from bench.systems.simulated_gpu import KEPT, PERIOD, TEMPERATURE, TOP_P, SimulatedGpu
from specdec.decoding.candidates import QueriedRow, draft_candidates
from specdec.decoding.choice import choose
from specdec.decoding.draft_logits import HostDraftLogits
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import draft_pass_of

VOCABULARY = 3000


def chain(engine: SimulatedGpu, tokens: int) -> PackedBatch:
    """Return a step over a text's first tokens, with logits for all of them."""
    packer, slots = engine.packer(), np.arange(1, 1 + tokens)
    rows = packer.add_rows([5] * tokens, 0, slots)
    packer.add_path(slots, rows)
    for row in rows:
        packer.want(row)
    return packer.pack()


def test_times_are_lines_between_what_was_measured() -> None:
    times = Times((1, 64, 256), (6.0, 8.0, 14.0))
    assert [times.seconds(rows) for rows in (1, 64, 160, 256, 352)] == pytest.approx([6e-3, 8e-3, 11e-3, 14e-3, 17e-3])


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_profiles_never_get_faster_with_rows(profile: Profile) -> None:
    for times in (profile.target, profile.draft):
        assert list(times.rows) == sorted(set(times.rows))
        assert list(times.ms) == sorted(times.ms)


def test_a_pass_takes_its_time() -> None:
    engine = SimulatedGpu(VOCABULARY, 100, lambda rows: 0.01 * rows)
    begin = time.perf_counter()
    engine.forward(chain(engine, 3))
    assert time.perf_counter() - begin >= 0.03


def test_passes_follow_one_another() -> None:
    engine = SimulatedGpu(VOCABULARY, 100, lambda rows: 0.01 * rows)
    begin = time.perf_counter()
    _, second = engine.launch(chain(engine, 2)), engine.launch(chain(engine, 2))
    second.logits(dict)
    assert time.perf_counter() - begin >= 0.04


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=1.0, top_k=5, seed=3),
        Sampling(temperature=0.8, top_p=0.9, seed=4),
    ],
)
def test_choices_are_those_of_the_rows(sampling: Sampling) -> None:
    engine = SimulatedGpu(VOCABULARY, 100, lambda rows: 0.0)
    queries = [SamplingQuery(RequestSampler(sampling), row + 1) for row in range(20)]
    rows = list(range(20))
    want = choose(engine.table[np.arange(20) % PERIOD], queries).tolist()
    in_advance: dict[int, SamplingQuery] = dict(enumerate(queries))
    for asked in (dict[int, SamplingQuery], in_advance.copy):
        got, sound = engine.launch(chain(engine, 20)).logits(asked).choose(rows, queries)
        assert got.tolist() == want
        assert sound.all()


def test_rows_are_as_flat_as_a_model_s() -> None:
    engine = SimulatedGpu(128256, 1, lambda rows: 0.0)
    weights = -np.sort(-np.exp(engine.table.astype(np.float64) / TEMPERATURE), axis=1)
    kept = (weights.cumsum(axis=1) < TOP_P * weights.sum(axis=1, keepdims=True)).sum(axis=1) + 1
    assert sorted(kept) == pytest.approx(KEPT, rel=0.05, abs=1)


def test_a_draft_s_candidates_are_those_of_the_rows() -> None:
    engine = SimulatedGpu(VOCABULARY, 100, lambda rows: 0.0)
    samplings = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(logit_bias={7: 50.0})]
    rows = [
        QueriedRow(row, SamplingQuery(RequestSampler(samplings[row % 3]), row + 1), VOCABULARY) for row in range(20)
    ]
    want = draft_candidates(HostDraftLogits(engine.forward(chain(engine, 20))), rows, 3)
    got = draft_candidates(draft_pass_of(engine)(chain(engine, 20)), rows, 3)
    for part, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_a_draft_gives_a_target_s_tokens_their_ranks() -> None:
    ranks = (0, 2, 0, 0, 1)
    target, draft = (SimulatedGpu(VOCABULARY, 100, lambda rows: 0.0, ranks=given) for given in ((0,), ranks))
    tokens = target.forward(chain(target, 40)).argmax(axis=1)
    ranking = np.argsort(-draft.forward(chain(draft, 40)), axis=1, kind="stable")
    found = [row.tolist().index(token) for row, token in zip(ranking, tokens.tolist(), strict=True)]
    assert found == [ranks[position % 5] for position in range(40)]


def test_the_draft_of_benchmarks_is_right_at_three_positions_of_four() -> None:
    assert RANKS.count(0) == 3 * len(RANKS) // 4
    assert sum(0 < rank < FAR for rank in RANKS) == RANKS.count(FAR)
