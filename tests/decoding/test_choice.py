"""The choice rule equals its specification (`choice_reference.py`), step by step and bit by bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.choice import choose
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from tests.choices import choose_token
from tests.choices import scores as scores_of
from tests.decoding.choice_reference import Case, cases, reference_choice, reference_perturbed
from tests.examples import examples


class TestChoose:
    @settings(max_examples=examples(150), deadline=None)
    @given(cases())
    def test_equals_the_reference(self, case: Case) -> None:
        assert case.choose() == reference_choice(case)

    @settings(max_examples=examples(50), deadline=None)
    @given(cases())
    def test_scores_are_what_the_choice_maximises(self, case: Case) -> None:
        """Scores are of the survivors; for greedy sampling, of all tokens, with banned ones at -inf."""
        ids, scores = scores_of(case.row, case.query)
        want = reference_perturbed(case)
        if case.sampling.temperature < 1e-4:
            want = {token: want.get(token, -math.inf) for token in range(len(case.logits))}
        assert dict(zip(ids.tolist(), scores.tolist(), strict=True)) == want
        assert ids.tolist() == sorted(want)

    @settings(max_examples=examples(50), deadline=None)
    @given(cases(), st.lists(st.integers(0, 11), max_size=6))
    def test_a_penalty_state_that_grew_is_the_penalty_state(self, case: Case, more: list[int]) -> None:
        more = [token % len(case.logits) for token in more]
        penalty_state = case.penalty_state
        penalty_state.extend(more)
        got = int(choose(case.row[None], [case.query._replace(penalty_state=penalty_state)])[0])
        assert got == reference_choice(replace(case, output=case.output + more))

    @settings(max_examples=examples(50), deadline=None)
    @given(cases())
    def test_neither_row_nor_penalty_state_is_changed(self, case: Case) -> None:
        row, penalty_state = np.array(case.logits, dtype=np.float32), case.penalty_state
        seen, counts = penalty_state.seen.copy(), penalty_state.output_counts.copy()
        choose_token(case.sampler, row, case.position, penalty_state, case.path)
        assert row.tobytes() == case.row.tobytes()
        assert np.array_equal(penalty_state.seen, seen)
        assert np.array_equal(penalty_state.output_counts, counts)

    def test_a_broken_row_is_found_whatever_is_allowed(self) -> None:
        """A token without a finite logit is chosen, even if the broken logit belongs to an excluded token."""
        logits = [1.0, math.nan, 2.0]
        for allowed in ({0}, {1}, {0, 2}):
            assert Case(logits, allowed=frozenset(allowed)).choose() == 1

    def test_greedy_takes_the_lowest_id_among_equals(self) -> None:
        assert Case([1.0, 3.0, 3.0, 3.0]).choose() == 1

    def test_a_temperature_below_1e_4_is_greedy_whatever_the_seed(self) -> None:
        """Of two equal logits, noise would choose the second for one of 100 seeds, except with probability 2**-100."""
        greedy = {Case([0.0, 0.0], Sampling(temperature=9.9e-5, seed=seed)).choose() for seed in range(100)}
        noisy = {Case([0.0, 0.0], Sampling(temperature=1e-4, seed=seed)).choose() for seed in range(100)}
        assert (greedy, noisy) == ({0}, {0, 1})

    def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equals(self) -> None:
        found = {Case([1.0] * 8, Sampling(temperature=1.0, top_k=3, seed=seed)).choose() for seed in range(200)}
        assert found == {0, 1, 2}  # false alarm: 3 * (2/3)**200 = 2e-35

    def test_top_p_keeps_the_smallest_set_that_reaches_p(self) -> None:
        """Four equal tokens and p = 1/2: two of them reach it exactly."""
        found = {Case([1.0] * 4, Sampling(temperature=1.0, top_p=0.5, seed=seed)).choose() for seed in range(200)}
        assert found == {0, 1}

    def test_end_tokens_wait_for_their_first_position(self) -> None:
        case = Case([0.0, 5.0, 1.0], end_tokens=frozenset({1}), first_end_position=7)
        assert replace(case, position=6).choose() == 2
        assert replace(case, position=7).choose() == 1

    def test_penalties_count_the_path_as_output(self) -> None:
        case = Case([2.0, 1.5], Sampling(frequency_penalty=0.3), output=[0])
        assert case.choose() == 0
        assert replace(case, path=[0]).choose() == 1

    def test_penalties_without_a_penalty_state_are_refused(self) -> None:
        sampler = RequestSampler(Sampling(presence_penalty=0.5))
        with pytest.raises(ValueError, match="history"):
            choose_token(sampler, np.zeros(3, dtype=np.float32), 0, None)
