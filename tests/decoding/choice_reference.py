"""The choice rule as a slow reference in plain Python, and inputs for comparisons with it.

It uses float32 where the design specifies float32 (by rounding every operation), float64 for top-p's sums and noise.
Vocabularies are small and logits lie on a coarse grid, so that ties occur at every step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.choice import choose
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery, TokenMask
from specdec.decoding.sampling import Sampling
from tests.choices import candidates, gumbel, mask_of
from tests.samplings import samplings


def float32(value: float) -> float:
    """Round `value` to float32; rounding each float64 result this way is exactly float32 arithmetic."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class Case:
    """All inputs of one choice."""

    logits: list[float]
    sampling: Sampling = field(default_factory=Sampling)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    position: int = 0
    end_tokens: frozenset[int] = frozenset()
    first_end_position: int = 0
    allowed: frozenset[int] | None = None
    ruled_out: tuple[int, ...] = ()

    @property
    def mask(self) -> TokenMask | None:
        return None if self.allowed is None else mask_of(self.allowed, len(self.logits))

    @property
    def row(self) -> NDArray[np.float32]:
        row = np.array(self.logits, dtype=np.float32)
        row.flags.writeable = False
        return row

    @property
    def penalty_state(self) -> PenaltyState:
        return PenaltyState(len(self.logits), self.prompt, self.output)

    @property
    def sampler(self) -> RequestSampler:
        return RequestSampler(self.sampling, self.end_tokens, self.first_end_position)

    @property
    def query(self) -> SamplingQuery:
        return SamplingQuery(
            self.sampler,
            self.position,
            self.penalty_state,
            self.path,
            allowed=self.mask,
            ruled_out=list(self.ruled_out),
        )

    def choose(self) -> int:
        return int(choose(self.row[None], [self.query])[0])

    def draft_candidates(self, width: int) -> tuple[list[int], list[float]]:
        return candidates(self.row, self.query, width)


def reference_adjusted(case: Case) -> list[float]:
    """Return logits after penalties, bias, bans and the token mask, in the design's order. If bans leave no token of
    the mask, the mask alone applies."""
    s = case.sampling
    output = case.output + case.path
    adjusted = []
    for token, logit in enumerate(case.logits):
        z = float32(logit)
        if token in case.prompt or token in output:
            penalty = float32(s.repetition_penalty)
            z = float32(z / penalty) if z > 0 else float32(z * penalty)
        z = float32(z - float32(float32(s.frequency_penalty) * output.count(token)))
        z = float32(z - (float32(s.presence_penalty) if token in output else 0.0))
        z = float32(z + float32(s.logit_bias.get(token, 0.0)))
        too_early = token in case.end_tokens and case.position < case.first_end_position
        banned = token in s.banned_tokens or token in case.ruled_out
        adjusted.append(-math.inf if banned or too_early else z)
    if case.allowed is None:
        return adjusted
    kept = [z if token in case.allowed else -math.inf for token, z in enumerate(adjusted)]
    if any(z > -math.inf for z in kept):
        return kept
    return [float32(z) if token in case.allowed else -math.inf for token, z in enumerate(case.logits)]


def reference_survivors(adjusted: Sequence[float], s: Sampling) -> dict[int, float]:
    """Divide by T, then apply top-k, top-p, min-p and typical-p; return the surviving ids and their logits."""
    temperature = float32(s.temperature)
    z = {token: float32(logit / temperature) for token, logit in enumerate(adjusted) if logit > -math.inf}
    ranked = sorted(z, key=lambda token: (-z[token], token))
    if s.top_k:
        ranked = ranked[: s.top_k]
    if s.top_p < 1.0:
        weights = [float32(math.exp(float32(z[token] - z[ranked[0]]))) for token in ranked]
        total = 0.0
        for weight in weights:
            total += weight
        reached, size = 0.0, 0
        while reached < s.top_p * total:
            reached += weights[size]
            size += 1
        ranked = ranked[:size]
    least = z[ranked[0]] + math.log(s.min_p) if s.min_p else -math.inf
    kept = {token: z[token] for token in sorted(ranked) if z[token] >= least}
    return reference_typical(kept, s.typical_p) if s.typical_p < 1.0 else kept


def reference_typical(z: Mapping[int, float], mass: float) -> dict[int, float]:
    """Keep the ids whose surprisals are closest to the entropy, until they reach this probability in total."""
    logits = np.array(list(z.values()), dtype=np.float64)
    logits -= logits.max()
    weights = np.exp(logits)
    surprisals, probabilities = math.log(weights.sum()) - logits, weights / weights.sum()
    entropy = (probabilities * surprisals).sum()
    reached, kept = 0.0, set()
    for _, token, probability in sorted(zip(np.abs(surprisals - entropy), z, probabilities, strict=True)):
        if reached < mass:
            kept.add(token)
        reached += probability
    return {token: logit for token, logit in z.items() if token in kept}


def reference_perturbed(case: Case) -> dict[int, float]:
    """Return the surviving ids and the values to maximise."""
    adjusted = reference_adjusted(case)
    if case.sampling.temperature < 1e-4:
        return {token: z for token, z in enumerate(adjusted) if z > -math.inf}
    survivors = reference_survivors(adjusted, case.sampling)
    seed, position = case.sampling.seed, case.position
    return {token: z + float(gumbel(seed, position, np.array([token]))[0]) for token, z in survivors.items()}


def reference_choice(case: Case) -> int:
    perturbed = reference_perturbed(case)
    return min(perturbed, key=lambda token: (-perturbed[token], token))


coarse = st.integers(-8, 8).map(lambda half: half / 2)
fine = st.floats(-30, 30, width=32)


@st.composite
def cases(
    draw: st.DrawFn,
    temperatures: Sequence[float] = (0.0, 5e-5, 1e-4, 0.3, 0.7, 1.0, 2.5, 1e30),
    vocabulary: int | None = None,
) -> Case:
    vocabulary = vocabulary or draw(st.integers(1, 12))
    token = st.integers(0, vocabulary - 1)
    tokens = st.lists(token, max_size=6)
    # some models mask vocabulary padding with -inf
    value = draw(st.sampled_from([coarse, fine, coarse | st.just(-math.inf)]))
    case = Case(
        logits=draw(st.lists(value, min_size=vocabulary, max_size=vocabulary)),
        sampling=draw(samplings(vocabulary, temperature=st.sampled_from(temperatures))),
        prompt=draw(tokens),
        output=draw(tokens),
        path=draw(tokens),
        position=draw(st.integers(0, 5)),
        end_tokens=draw(st.just(frozenset()) | st.frozensets(token)),
        first_end_position=draw(st.integers(0, 5)),
        allowed=draw(st.none() | st.frozensets(token, min_size=1)),
        ruled_out=draw(st.just(()) | st.lists(token, max_size=3).map(tuple)),
    )
    assume(any(z > -math.inf for z in reference_adjusted(case)))  # with every token banned there is no choice
    return case
