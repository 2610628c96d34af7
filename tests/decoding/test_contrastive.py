"""Contrastive decoding against its formula in Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.choice import choose
from specdec.decoding.contrastive import amateur_distribution
from specdec.decoding.proposal import Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import DEFAULT_CONTRAST, Contrast, Rule, Sampling

logits = st.lists(st.floats(-20, 20, width=16), min_size=2, max_size=12)


def chosen(target: list[float], draft: list[float], contrast: Contrast = DEFAULT_CONTRAST, **sampling: object) -> int:
    row = amateur_distribution(np.asarray(draft, dtype=np.float32), contrast)
    sampler = RequestSampler(Sampling(**sampling), rule=Rule.CONTRASTIVE, contrast=contrast)  # type: ignore[arg-type]
    query = SamplingQuery(sampler, 3, proposal=Proposal((), row))
    return int(choose(np.asarray([target], dtype=np.float32), [query])[0])


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


def test_without_a_row_nothing_can_be_chosen() -> None:
    with pytest.raises(ValueError, match="nothing to contrast"):
        choose(np.zeros((1, 3), np.float32), [SamplingQuery(RequestSampler(Sampling(), rule=Rule.CONTRASTIVE), 3)])
