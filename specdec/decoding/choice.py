"""The choice rule: from a row of logits to one token, the same at draft and verifier.

    choice = argmax over surviving v of  z[v] + g(seed, position, v)

where z are the processed logits and g is the shared Gumbel noise. Everything the system promises
about reproducibility rests on this being a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import gumbel
from specdec.decoding.sampling import Sampling

Logits = NDArray[np.float32]

LOOKED_AT = 256
"""Of a draft's logits so many, the largest, are looked at for candidates."""

AGREEMENT_SCALE = 0.6
"""How far a draft's logits are taken to be from its target's. Under the demo pair's draft, the likelihood of
the target's choices is highest with 0.5 at temperature 0, 0.6 at 0.7 and 0.7 at 1 (fitted once, by hand)."""


class History:
    """Which tokens a text holds, for the penalties: prompt as a set, output as counts."""

    def __init__(self, vocabulary: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seen = np.zeros(vocabulary, dtype=bool)
        self.output_counts = np.zeros(vocabulary, dtype=np.int32)
        self.seen[np.asarray(prompt, dtype=np.int64)] = True
        self.extend(output)

    def extend(self, output: Sequence[int]) -> None:
        ids = np.asarray(output, dtype=np.int64)
        self.seen[ids] = True
        np.add.at(self.output_counts, ids, 1)


@dataclass(frozen=True)
class Chooser:
    """The choice rule of one request.

    `end_tokens` are not chosen while the text is shorter than `first_end_position`, an absolute
    position: the way `min_tokens` is kept.
    """

    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    first_end_position: int = 0

    def choose(self, logits: Logits, position: int, history: History | None, path: Sequence[int] = ()) -> int:
        """The token at absolute `position`, from float32 logits [V].

        `history` covers the committed text and is needed if the sampling penalises; `path` are the
        guessed tokens between it and this position.
        """
        if self.sampling.greedy:
            return int(self._adjusted(logits, position, history, path).argmax())
        ids, scores = self.scores(logits, position, history, path)
        return int(ids[scores.argmax()])

    def scores(
        self, logits: Logits, position: int, history: History | None, path: Sequence[int] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids, ascending, and what the choice is the argmax of; ids that do not survive are left out, or
        have the score -inf."""
        z = self._adjusted(logits, position, history, path)
        if self.sampling.greedy:
            return np.arange(len(z)), z.astype(np.float64)
        ids, z = _survivors(z, self.sampling)
        return ids, z.astype(np.float64) + gumbel(self.sampling.seed, position, ids)

    def preferences(
        self, logits: Logits, position: int, history: History | None, path: Sequence[int], width: int
    ) -> tuple[list[int], list[float]]:
        """The `width` likeliest choices of *another* model with the same noise, best first, as
        (tokens, log-probabilities).

        The other model's logits are taken to differ from these by noise of a fixed scale, so that its choice
        is softmax-distributed over the perturbed logits (measured before the division by T) at that scale.
        Only the LOOKED_AT largest logits are looked at; what that misses costs acceptance, nothing else.
        """
        z = self._adjusted(logits, position, history, path)
        if len(z) > LOOKED_AT:
            ids = np.sort(np.argpartition(z, len(z) - LOOKED_AT)[-LOOKED_AT:])
            z = z[ids]
        else:
            ids = np.arange(len(z))
        perturbed = z.astype(np.float64)
        if not self.sampling.greedy:
            kept, z = _survivors(z, self.sampling)
            ids = ids[kept]
            perturbed = self.sampling.temperature * (z + gumbel(self.sampling.seed, position, ids))
        perturbed /= AGREEMENT_SCALE
        best = np.argsort(-perturbed, kind="stable")[:width]
        best = best[perturbed[best] > -np.inf]
        if not len(best):
            return [], []
        log_total = np.log(np.exp(perturbed - perturbed[best[0]]).sum()) + perturbed[best[0]]
        return ids[best].tolist(), (perturbed[best] - log_total).tolist()

    def _adjusted(self, logits: Logits, position: int, history: History | None, path: Sequence[int]) -> Logits:
        """Penalties, bias and bans; the caller's row is left alone."""
        s = self.sampling
        bans_ends = position < self.first_end_position and bool(self.end_tokens)
        if not (s.penalises or s.logit_bias or s.banned_tokens or bans_ends):
            return logits
        z = logits.copy()
        if s.penalises:
            if history is None:
                raise ValueError("penalties need the history of the text")
            seen, counts = history.seen, history.output_counts
            if path:
                seen, counts = seen.copy(), counts.copy()
                seen[list(path)] = True
                np.add.at(counts, list(path), 1)
            if s.repetition_penalty != 1.0:
                penalty = np.float32(s.repetition_penalty)
                z = np.where(seen, np.where(z > 0, z / penalty, z * penalty), z)
            z -= np.float32(s.frequency_penalty) * counts.astype(np.float32)
            z -= np.float32(s.presence_penalty) * (counts > 0).astype(np.float32)
        for token, bias in s.logit_bias.items():
            z[token] += np.float32(bias)
        if s.banned_tokens:
            z[list(s.banned_tokens)] = -np.inf
        if bans_ends:
            z[list(self.end_tokens)] = -np.inf
        return z


def _survivors(z: Logits, sampling: Sampling) -> tuple[NDArray[np.int64], Logits]:
    """Divide by T, then top-k, top-p and min-p: the surviving ids, ascending, and their logits.

    Top-k keeps exactly k, top-p the smallest set that reaches p (probabilities cumulated in float64,
    descending); both break ties towards the lower id.
    """
    z = z / np.float32(sampling.temperature)
    ids = np.flatnonzero(z > -np.inf)
    if len(ids) < len(z):
        z = z[ids]
    if 0 < sampling.top_k < len(z):
        smallest = np.partition(z, len(z) - sampling.top_k)[len(z) - sampling.top_k]
        keep = z > smallest
        ties = np.flatnonzero(z == smallest)
        keep[ties[: sampling.top_k - int(keep.sum())]] = True
        ids, z = ids[keep], z[keep]
    if sampling.top_p < 1.0:
        weights = np.exp(z.astype(np.float64) - float(z.max()))
        total = float(weights.sum())
        # All tokens lighter than this together weigh less than what top-p cuts off: they need no sorting.
        heavy = np.flatnonzero(weights >= (1.0 - sampling.top_p) * total / len(weights))
        order = heavy[np.argsort(-z[heavy], kind="stable")]
        size = int(np.searchsorted(np.cumsum(weights[order]), sampling.top_p * total)) + 1
        chosen = np.sort(order[:size])
        ids, z = ids[chosen], z[chosen]
    if sampling.min_p > 0.0:
        keep = z >= float(z.max()) + np.log(sampling.min_p)
        ids, z = ids[keep], z[keep]
    return ids, z


def log_softmax(logits: Logits) -> Logits:
    """float32 [V], computed in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float32)
