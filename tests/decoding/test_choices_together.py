"""`choose` over many rows gives the same tokens as row by row, and over vocabularies of real size the same as a plain
sort with noise for every id."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.choice import BLOCK, choose
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from tests.choices import gumbel
from tests.decoding.choice_reference import (
    Case,
    cases,
    coarse,
    fine,
    reference_adjusted,
    reference_choice,
    reference_typical,
)
from tests.examples import examples


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[NDArray[np.float32], SamplingQuery]]:
    """Rows of several requests, some with several rows sharing sampler and penalty state."""
    vocabulary = draw(st.integers(1, 12))
    token = st.integers(0, vocabulary - 1)
    value = st.just(math.nan) | st.just(math.inf) | st.just(-math.inf) | coarse
    rows = []
    for case in draw(st.lists(cases(vocabulary=vocabulary), min_size=1, max_size=5)):
        first = case.query
        rows.append((case.row, first))
        for _ in range(draw(st.integers(0, 3))):
            logits = draw(
                st.lists(draw(st.sampled_from([coarse, fine, value])), min_size=vocabulary, max_size=vocabulary)
            )
            path, position = draw(st.lists(token, max_size=4)), draw(st.integers(0, 5))
            rows.append((np.array(logits, dtype=np.float32), first._replace(position=position, path=path)))
    return draw(st.permutations(rows))


def together(rows: Sequence[tuple[NDArray[np.float32], SamplingQuery]]) -> list[int]:
    found = choose(np.stack([row for row, _ in rows]), [query for _, query in rows])
    assert found.dtype == np.int64
    tokens: list[int] = found.tolist()
    return tokens


def naive_choice(row: NDArray[np.float32], query: SamplingQuery) -> int:
    """Choose for one sampled row by a full sort and noise for all ids; no penalties, bias or bans."""
    s = query.sampler.sampling
    z = row / np.float32(s.temperature)
    ranking = np.argsort(-z, kind="stable")
    ranking = ranking[z[ranking] > -np.inf]
    if s.top_k:
        ranking = ranking[: s.top_k]
    if s.top_p < 1.0:
        reached = np.cumsum(np.exp(z[ranking] - z.max()), dtype=np.float64)
        ranking = ranking[: int((reached < s.top_p * reached[-1]).sum()) + 1]
    if s.min_p:
        ranking = ranking[z[ranking] >= np.float64(z.max()) + math.log(s.min_p)]
    if s.typical_p < 1.0:
        ranking = np.array(list(reference_typical({int(token): z[token] for token in sorted(ranking)}, s.typical_p)))
    scores = np.full(len(z), -np.inf)
    scores[ranking] = z[ranking] + gumbel(s.seed, query.position, np.arange(len(z)))[ranking]
    return int(scores.argmax())


KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "top-k": [{"top_k": 1}, {"top_k": 50}, {"top_k": 10**6}],
    "top-p": [{"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999}],
    "min-p": [{"min_p": 0.9}, {"min_p": 0.02}],
    "typical-p": [{"typical_p": 0.2}, {"typical_p": 0.9}, {"typical_p": 0.95, "top_k": 40}],
    "mixed": [{}, {"top_k": 40, "top_p": 0.9}, {"top_k": 100, "min_p": 0.01}, {"top_p": 0.9, "min_p": 0.05}],
}


def random_rows(rng: np.random.Generator, count: int, vocabulary: int) -> NDArray[np.float32]:
    """Return peaked, ordinary and flat rows; one in four has many ties, and another one in four is mostly masked."""
    spread = rng.choice([0.0, 0.3, 3.0, 30.0], size=(count, 1))
    rows = (rng.normal(0, 1, (count, vocabulary)) * spread + rng.normal(0, 20, (count, 1))).astype(np.float32)
    rows[1::4] = np.round(rows[1::4])
    masked = rng.random((len(rows[2::4]), vocabulary)) < 0.9
    masked[:, rng.integers(vocabulary)] = False
    rows[2::4][masked] = -np.inf
    return np.asarray(rows)


class TestManyRows:
    @settings(max_examples=examples(40), deadline=None)
    @given(batches(), st.data())
    def test_a_row_does_not_depend_on_the_others(
        self, batch: list[tuple[NDArray[np.float32], SamplingQuery]], data: st.DataObject
    ) -> None:
        """Including broken rows: they raise nothing and change no other row."""
        alone = [int(choose(row[None], [query])[0]) for row, query in batch]
        assert together(batch) == alone
        some = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1))
        assert together([batch[i] for i in some]) == [alone[i] for i in some]

    @settings(max_examples=examples(30), deadline=None)
    @given(st.data(), st.integers(1, 12))
    def test_every_row_equals_the_reference(self, data: st.DataObject, vocabulary: int) -> None:
        batch = data.draw(st.lists(cases(vocabulary=vocabulary), min_size=1, max_size=6))
        assert together([(case.row, case.query) for case in batch]) == [reference_choice(case) for case in batch]

    @settings(max_examples=examples(50), deadline=None)
    @given(cases(), st.data())
    def test_rows_of_one_text_have_penalties_of_their_own_paths(self, case: Case, data: st.DataObject) -> None:
        paths = data.draw(st.lists(st.lists(st.integers(0, len(case.logits) - 1), max_size=6), min_size=1))
        of_paths = [replace(case, path=path) for path in paths]
        assume(all(any(z > -math.inf for z in reference_adjusted(each)) for each in of_paths))
        query = case.query
        rows = [(case.row, query._replace(path=path)) for path in paths]
        assert together(rows) == [reference_choice(each) for each in of_paths]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("vocabulary", "count"), [(1, 50), (2, 400), (50, 400), (4096, 200)])
    def test_large_rows_equal_the_naive_rule(self, kind: str, vocabulary: int, count: int) -> None:
        rng = np.random.default_rng([*kind.encode(), vocabulary])
        rows = random_rows(rng, count, vocabulary)
        queries = []
        for i in range(count):
            temperature = float(rng.choice([1e-4, 0.2, 0.8, 1.0, 5.0, 1e4, 1e30]))
            sampling = Sampling(temperature=temperature, seed=i // 3, **KINDS[kind][i % len(KINDS[kind])])
            queries.append(SamplingQuery(RequestSampler(sampling), int(rng.integers(10**6))))
        assert together(list(zip(rows, queries, strict=True))) == list(map(naive_choice, rows, queries))

    def test_rows_that_are_worked_on_in_parts(self) -> None:
        """More rows than fit into a block, and rows longer than a block."""
        queries = [SamplingQuery(RequestSampler(Sampling(temperature=0.8, seed=i)), i) for i in range(100)]
        for vocabulary, count in ((4096, BLOCK // 4096 + 20), (2 * BLOCK + 3, 2)):
            rows = np.random.default_rng(vocabulary).normal(0, 0.1, (count, vocabulary)).astype(np.float32)
            want = list(map(naive_choice, rows, queries[:count]))
            assert together(list(zip(rows, queries[:count], strict=True))) == want
        last = np.full((1, 2 * BLOCK), -np.inf, dtype=np.float32)
        last[0, -1] = 0.0
        assert choose(last, queries[:1]).tolist() == [2 * BLOCK - 1]

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3}])
    @pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e35])
    def test_a_broken_row_chooses_what_is_broken(self, sampling: dict[str, Any], broken: float) -> None:
        row = np.array([0.0, 1.0, broken, 2.0], dtype=np.float32)
        if broken == -math.inf:
            row[:] = broken
        assert row[Case(row.tolist(), Sampling(**sampling)).choose()].tobytes() == np.float32(broken).tobytes()

    def test_neighbours_without_a_penalty_state_are_still_different_requests(self) -> None:
        row = np.zeros(3, dtype=np.float32)
        queries = [SamplingQuery(RequestSampler(Sampling(logit_bias={token: 1.0})), 7) for token in (2, 1)]
        assert together([(row, query) for query in queries]) == [2, 1]

    def test_a_banned_nan_breaks_nothing(self) -> None:
        sampling = Sampling(temperature=0.5, banned_tokens=frozenset({1}))
        assert Case([-50.0, math.nan, 50.0], sampling).choose() == 2

    def test_no_rows_choose_nothing(self) -> None:
        assert choose(np.zeros((0, 5), dtype=np.float32), []).tolist() == []
