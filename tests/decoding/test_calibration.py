"""Calibrated logprobs converge to the observed acceptance."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.calibration import MAX_SHIFT, MAX_TENANTS, RANKS, Calibration, Calibrations, corrected
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling

log_probabilities = st.lists(st.floats(-30.0, 0.0), min_size=1, max_size=6).map(lambda s: sorted(s, reverse=True))


@given(st.integers(0, 10), log_probabilities)
def test_at_first_logprobs_stay_what_they_are(depth: int, logprobs: list[float]) -> None:
    got = Calibration().corrected(depth, logprobs)
    assert [math.exp(s) for s in got] == pytest.approx([math.exp(s) for s in logprobs], abs=2e-6)


def reference(shifts: list[float], logprobs: list[float]) -> list[float]:
    """Return the calibrated logprobs of one node's children, computed in scalars."""
    result: list[float] = []
    for rank, logprob in enumerate(logprobs):
        p = min(max(math.exp(logprob), 1e-6), 1.0 - 1e-6)
        odds = math.log(p / (1.0 - p)) + shifts[min(rank, RANKS - 1)]
        calibrated = -math.log1p(math.exp(-odds))
        result.append(min(calibrated, result[-1]) if result else calibrated)
    return result


shifts_of_ranks = st.lists(st.floats(-MAX_SHIFT, MAX_SHIFT), min_size=RANKS, max_size=RANKS)


@given(st.lists(st.tuples(shifts_of_ranks, log_probabilities), min_size=1))
def test_nodes_of_a_pass_are_corrected_as_each_alone(nodes: list[tuple[list[float], list[float]]]) -> None:
    """Up to 1e-9: near probability 1 the reference subtracts almost equal numbers."""
    width = max(len(logprobs) for _, logprobs in nodes)
    padded = np.array([logprobs + [-math.inf] * (width - len(logprobs)) for _, logprobs in nodes])
    got = corrected([shifts for shifts, _ in nodes], padded)
    for own, (shifts, logprobs) in zip(got, nodes, strict=True):
        assert own[: len(logprobs)] == pytest.approx(reference(shifts, logprobs), rel=1e-9)
        assert (own[len(logprobs) :] == -math.inf).all()


@given(st.integers(0, 10), log_probabilities, st.lists(st.tuples(st.integers(0, 10), st.integers(0, 6)), max_size=300))
def test_they_stay_ordered_log_probabilities(
    depth: int, logprobs: list[float], verdicts: list[tuple[int, int]]
) -> None:
    calibration = Calibration()
    for at, taken in verdicts:
        calibration.learn(at, taken, calibration.corrected(at, logprobs))
    got = calibration.corrected(depth, logprobs)
    assert got == sorted(got, reverse=True)
    assert all(-math.inf < logprob <= 0.0 for logprob in got)


@pytest.mark.parametrize("real", [[0.9, 0.05, 0.01], [0.5, 0.2, 0.1], [0.2, 0.05, 0.02]])
def test_a_draft_that_misjudges_itself_is_corrected(real: list[float]) -> None:
    """Separately for each depth and rank; outcomes are drawn from `real`."""
    calibration, random = Calibration(), Random(0)
    said = [math.log(p) for p in (0.6, 0.2, 0.1)]
    for _ in range(4000):
        taken = next((rank for rank in range(3) if random.random() < real[rank] / (1 - sum(real[:rank]))), None)
        calibration.learn(1, taken, calibration.corrected(1, said))
    got = [math.exp(logprob) for logprob in calibration.corrected(1, said)]
    assert got == pytest.approx(real, abs=0.07)
    assert calibration.corrected(0, said) == pytest.approx(said, abs=1e-5)


def test_nothing_is_learned_for_sure() -> None:
    calibration = Calibration()
    for _ in range(100_000):
        calibration.learn(0, None, calibration.corrected(0, [math.log(0.5)] * RANKS))
    odds = math.exp(calibration.corrected(0, [math.log(0.5)])[0])
    assert odds == pytest.approx(1 / (1 + math.exp(MAX_SHIFT)), rel=1e-6)


def test_a_text_begins_with_what_its_tenants_texts_have_taught() -> None:
    """A new text starts from the calibration of its tenant's earlier texts, not of other tenants'."""
    known, sampler = Calibrations(), RequestSampler(Sampling())
    useless = known.of(sampler, "useless")
    for _ in range(300):
        useless.learn(0, None, [-0.1])
    (before,) = Calibration().corrected(0, [-0.1])
    assert useless.corrected(0, [-0.1])[0] < before - 1.0
    assert known.of(sampler, "useless").corrected(0, [-0.1]) == useless.corrected(0, [-0.1])
    assert known.of(sampler, "other").corrected(0, [-0.1]) == [before]
    two = known.of(sampler, "other"), known.of(sampler, "other")
    two[0].learn(0, None, [-0.1])
    assert two[1].corrected(0, [-0.1]) == [before]  # each text has its own shifts
    for number in range(MAX_TENANTS):
        known.of(sampler, str(number))
    assert known.of(sampler, "useless").corrected(0, [-0.1]) == [before]


def test_concurrent_texts_move_their_tenants_calibration_no_further_than_the_truth() -> None:
    """64 texts whose draft says 0.6 of candidates that the target takes with probability 0.7."""
    known, sampler, random = Calibrations(), RequestSampler(Sampling()), Random(0)
    said, real = [math.log(0.6)], 0.7
    for _ in range(2):
        texts = [known.of(sampler, "tenant") for _ in range(64)]
        for _ in range(60):
            for text in texts:
                text.learn(0, 0 if random.random() < real else None, text.corrected(0, said))
        assert math.exp(known.of(sampler, "tenant").corrected(0, said)[0]) == pytest.approx(real, abs=0.07)
