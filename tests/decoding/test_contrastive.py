"""Contrastive decoding against its formula in Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.choice import choose
from specdec.decoding.contrastive import (
    MAX_LIKELIEST,
    UNDECIDED,
    amateur_distribution,
    answer,
    answers,
    ids_to_query,
    likeliest,
)
from specdec.decoding.proposal import MAX_PARTIAL_IDS, DraftDistribution, Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import DEFAULT_CONTRAST, Contrast, Rule, Sampling
from specdec.decoding.step_logits import HostLogits

logits = st.lists(st.floats(-20, 20, width=16), min_size=2, max_size=12)


def chosen(target: list[float], draft: list[float], contrast: Contrast = DEFAULT_CONTRAST, **sampling: object) -> int:
    row = amateur_distribution(np.asarray(draft, dtype=np.float32), contrast)
    token, _ = asked(target, row, contrast, **sampling)
    return token


def asked(target: list[float], row: DraftDistribution, contrast: Contrast, **sampling: object) -> tuple[int, list[int]]:
    """Return the token chosen with a draft's row, and the plausible tokens."""
    sampler = RequestSampler(Sampling(**sampling), rule=Rule.CONTRASTIVE, contrast=contrast)  # type: ignore[arg-type]
    queries = [SamplingQuery(sampler, 3, proposal=Proposal((), row))]
    logits = HostLogits(np.asarray([target], dtype=np.float32))
    tokens, sound = logits.choose([0], queries)
    assert sound.all()
    (found,) = logits.plausible([0], queries)
    return int(tokens[0]), found.tolist()


def by_the_formula(target: list[float], draft: list[float], contrast: Contrast) -> int:
    z = [d / contrast.amateur_temperature for d in draft]
    log_q = [float(np.float16(v - max(z) - math.log(math.fsum(math.exp(w - max(z)) for w in z)))) for v in z]
    kept = [v for v, t in enumerate(target) if t >= max(target) + math.log(contrast.alpha)]
    return max(kept, key=lambda v: (target[v] - log_q[v], -v))


@given(st.data(), st.floats(0.01, 1.0), st.floats(0.25, 4.0))
def test_it_is_the_formula(data: st.DataObject, alpha: float, temperature: float) -> None:
    target = data.draw(logits)
    draft = data.draw(st.lists(st.floats(-20, 20, width=16), min_size=len(target), max_size=len(target)))
    contrast = Contrast(alpha, temperature)
    assert chosen(target, draft, contrast) == by_the_formula(target, draft, contrast)


@given(logits)
def test_with_alpha_1_the_target_decides(target: list[float]) -> None:
    assert chosen(target, [0.0] * len(target), Contrast(alpha=1.0)) == int(np.argmax(target))


def test_it_prefers_what_the_draft_does_not_expect() -> None:
    assert chosen([2.0, 1.9, -9.0], [3.0, 0.0, -30.0]) == 1  # the third is not plausible


def test_bans_hold() -> None:
    assert chosen([2.0, 1.9, 1.8], [3.0, 0.0, 0.0], banned_tokens=frozenset({1})) == 2


def test_tokens_that_the_draft_does_not_have_are_left_out() -> None:
    assert chosen([1.0, 1.0, 5.0], [0.0, -1.0]) == 1


rows = st.lists(st.floats(-20, 20, width=16), min_size=2, max_size=40)


@given(st.data(), st.floats(0.001, 1.0), st.floats(0.25, 4.0), st.floats(0.0, 6.0))
def test_what_is_sent_ahead_changes_no_choice(
    data: st.DataObject, alpha: float, temperature: float, margin: float
) -> None:
    """A row is decided as with the whole vocabulary or left undecided; then the answer to the query decides it."""
    target = data.draw(rows)
    draft = data.draw(st.lists(st.floats(-20, 20, width=16), min_size=len(target), max_size=len(target) + 3))
    contrast = Contrast(alpha, temperature)
    whole = amateur_distribution(np.asarray(draft, dtype=np.float32), contrast)
    wanted, plausible = asked(target, whole, contrast)
    part = likeliest(whole, contrast, margin)
    token, same = asked(target, part, contrast)
    assert same == plausible
    if part.ids is None or set(plausible) <= set(part.ids.tolist()):
        assert token == wanted
        return
    assert token == UNDECIDED
    ids = ids_to_query(np.array(plausible), None, part.size)
    assert not answers(part, ids)
    again = answer(whole, ids)
    assert answers(again, ids)
    assert asked(target, again, contrast) == (wanted, plausible)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=2000), st.floats(0.001, 1.0), st.floats(0.0, 6.0))
def test_the_likeliest_tokens_are_sent(draft: list[int], alpha: float, margin: float) -> None:
    whole = amateur_distribution(np.asarray(draft, dtype=np.float32), DEFAULT_CONTRAST)
    part = likeliest(whole, Contrast(alpha), margin)
    if part.ids is None:
        assert part is whole
        return
    assert len(part.ids) <= min(MAX_LIKELIEST, len(draft) / 2)
    assert (np.diff(part.ids) > 0).all()
    assert (part.values == whole.values[part.ids]).all()
    others = np.delete(whole.values, part.ids)
    assert others.max() <= part.values.min()
    if len(part.ids) < MAX_LIKELIEST:
        assert others.max() < float(whole.values.max()) + math.log(alpha) - margin + 2**-6  # float16 rounding
    assert part.size == len(draft)


def test_a_large_query_is_about_the_whole_vocabulary() -> None:
    assert ids_to_query(np.arange(MAX_PARTIAL_IDS), None, 100_000) is not None
    assert ids_to_query(np.arange(MAX_PARTIAL_IDS + 1), None, 100_000) is None
    assert ids_to_query(np.arange(51), None, 100) is None
    whole = amateur_distribution(np.zeros(100, np.float32), DEFAULT_CONTRAST)
    assert answer(whole, None).ids is None
    assert answers(whole, None)
    assert not answers(answer(whole, np.arange(50)), None)


def test_a_second_query_covers_the_first() -> None:
    """A token at the limit of plausibility may be plausible in only one of two steps."""
    ids = ids_to_query(np.array([3, 9]), np.array([3, 7]), 100)
    assert ids is not None
    assert ids.tolist() == [3, 7, 9]


def test_a_draft_answers_as_far_as_its_vocabulary_goes() -> None:
    whole = amateur_distribution(np.arange(10, dtype=np.float32), DEFAULT_CONTRAST)
    part = answer(whole, np.array([3, 9, 11]))
    assert part.ids is not None
    assert part.ids.tolist() == [3, 9]
    assert answers(part, np.array([3, 9, 11]))
    assert answer(whole, np.array([11])).ids is None


def test_a_row_without_an_allowed_token_that_the_draft_has_is_decided_by_the_target() -> None:
    part = DraftDistribution(np.array([1]), np.array([-0.5], np.float16), vocabulary=3)
    assert asked([1.0, 2.0, 3.0, 0.5], part, DEFAULT_CONTRAST, banned_tokens=frozenset({0, 1, 2})) == (3, [])


def test_without_a_row_nothing_can_be_chosen() -> None:
    with pytest.raises(ValueError, match="nothing to contrast"):
        choose(np.zeros((1, 3), np.float32), [SamplingQuery(RequestSampler(Sampling(), rule=Rule.CONTRASTIVE), 3)])
