"""Typical acceptance: the accepted path equals that of the definition, tried on every path of small trees."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Rule, Sampling, Typicality
from specdec.decoding.step_logits import HostLogits
from specdec.decoding.typical import TypicalCandidate, TypicalQuery, accepted, threshold
from tests.choices import mask_of

VOCABULARY = 6
SAMPLER = RequestSampler(Sampling(temperature=0.8), rule=Rule.TYPICAL)

Logits = NDArray[np.float32]


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(z - z.max())
    return np.asarray(weights / weights.sum())


def is_typical(logits: Logits, token: int, temperature: float, typicality: Typicality) -> bool:
    """Return whether a token is accepted, by the formula of the paper."""
    p = softmax(logits.astype(np.float64) / temperature)
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return bool(p[token] > min(typicality.epsilon, typicality.delta * math.exp(-entropy)))


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Logits], TypicalQuery, dict[tuple[int, ...], int]]:
    """Draw a tree of candidates; return its rows, the query, and the row below each path that has candidates."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    typicality = Typicality(draw(st.sampled_from([0.05, 0.2, 0.6])), draw(st.sampled_from([0.1, 0.3, 1.0])))
    sampler = replace(SAMPLER, typicality=typicality)
    rows: dict[tuple[int, ...], int] = {(): 0}
    candidates: list[TypicalCandidate] = []
    waiting: list[tuple[int, ...]] = [()]
    for path in waiting:
        below = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3, unique=True)) if len(path) < 3 else []
        if path and below:
            rows[path] = len(rows)
            place = next(
                n
                for n, own in enumerate(candidates)
                if (rows_path(rows, own.parent), own.token) == (path[:-1], path[-1])
            )
            candidates[place] = candidates[place]._replace(node=rows[path])
        for token in below:
            candidates.append(TypicalCandidate(rows[path], token, None))
            waiting.append((*path, token))
    logits = [random.normal(scale=2.0, size=VOCABULARY).astype(np.float32) for _ in rows]
    queries = [SamplingQuery(sampler, 5 + len(path)) for path in rows]
    return logits, TypicalQuery(list(range(len(rows))), queries, candidates), rows


def rows_path(rows: dict[tuple[int, ...], int], row: int) -> tuple[int, ...]:
    return next(path for path, own in rows.items() if own == row)


@given(trees())
def test_the_longest_typical_path_is_accepted(
    tree: tuple[list[Logits], TypicalQuery, dict[tuple[int, ...], int]],
) -> None:
    logits, query, rows = tree
    sampler = query.queries[0].sampler
    temperature = sampler.sampling.temperature
    paths: dict[tuple[int, ...], float] = {(): 0.0}  # accepted ones, with their log-probabilities
    for candidate in query.candidates:
        above, row = rows_path(rows, candidate.parent), logits[candidate.parent]
        if above in paths and is_typical(row, candidate.token, temperature, sampler.typicality):
            p = softmax(row.astype(np.float64) / temperature)[candidate.token]
            paths[*above, candidate.token] = paths[above] + math.log(p)
    got = tuple(accepted(logits, query))
    longest = max(map(len, paths))
    assert len(got) == longest
    assert paths[got] == pytest.approx(max(own for path, own in paths.items() if len(path) == longest), abs=1e-6)
    assert HostLogits(np.stack(logits)).accept_typical([query]) == [list(got)]


@pytest.mark.parametrize(
    ("p", "want"),
    [
        ([1.0], 0.09),  # no entropy: epsilon
        ([0.5, 0.5], 0.09),  # 0.3 exp(-log 2) = 0.15
        ([0.1] * 10, 0.03),  # 0.3 / 10
        ([0.5, 0.25, 0.25, 0.0], 0.09),
    ],
)
def test_the_threshold_is_the_smaller_of_two(p: list[float], want: float) -> None:
    assert threshold(np.array(p), Typicality()) == pytest.approx(want)


def one_level(logits: list[float], tokens: list[int], **fields: Any) -> list[int]:
    query = SamplingQuery(SAMPLER, 5)._replace(**fields)
    candidates = [TypicalCandidate(0, token, None) for token in tokens]
    return accepted([np.array(logits, dtype=np.float32)], TypicalQuery([0], [query], candidates))


def test_of_equally_long_paths_the_most_probable_is_accepted() -> None:
    assert one_level([2.0, 2.5, -9.0], [0, 1, 2]) == [1]
    assert one_level([2.0, 2.0, -9.0], [1, 0, 2]) == [1]  # the first of equal ones
    assert one_level([2.0, 2.5, -9.0], [2]) == []


def test_what_cannot_be_chosen_is_not_typical() -> None:
    assert one_level([1.0, 2.0, 0.0], [1], allowed=mask_of({0, 2}, 3)) == []
    assert one_level([1.0, 2.0, 0.0], [1], ruled_out=(1,)) == []
    truncated = replace(SAMPLER, sampling=Sampling(temperature=0.8, top_k=1))
    assert one_level([1.0, 1.9, 2.0], [1], sampler=truncated) == []
    assert one_level([1.0, 1.9, 2.0], [1]) == [1]


def test_nothing_is_accepted_below_a_broken_row() -> None:
    for broken in (math.nan, math.inf):
        assert one_level([1.0, broken, 2.0], [2]) == []
