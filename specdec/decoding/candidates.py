"""Candidates of a draft: the tokens another model with the same noise is most likely to choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, DraftLogits, Shortlists, shortlists
from specdec.decoding.noise import stream_at, token_words, word_gumbel
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted, tempered
from specdec.decoding.query import SamplingQuery
from specdec.decoding.truncation import survivors_of_largest, truncates

AGREEMENT_SCALE = 0.6
"""Scale of the assumed noise between a draft's logits and its target's. For the demo pair, the maximum-likelihood value
given the target's choices is 0.5 at T = 0, 0.6 at T = 0.7 and 0.7 at T = 1 (fitted once, by hand)."""

SORTED_WHOLE = 4
"""Maximum length of a row for a complete sort, as a multiple of the number of candidates. Longer rows are partitioned
first, which is faster."""


MIN_CONFIDENCE = 1e-6
"""Minimum distance of a probability from 0 and 1: the logarithms of the probability and its complement stay finite."""


class QueriedRow(NamedTuple):
    """A row of draft logits, and everything else its candidates depend on."""

    number: int  # row number in the draft logits
    query: SamplingQuery
    vocabulary: int  # vocabulary size: ids below it are tokens


class Candidates(NamedTuple):
    """The candidates of n rows, most likely first. Rows with fewer candidates end with logprobs of -inf."""

    tokens: NDArray[np.int64]  # [n, width]
    logprobs: NDArray[np.float64]  # [n, width]
    sound: NDArray[np.bool_]  # [n] False: the draft's logits are broken (see `choose`), so there are no candidates


def draft_candidates(logits: DraftLogits, rows: Sequence[QueriedRow], width: int) -> Candidates:
    """Return, for each row, the `width` most likely choices of *another* model with the same noise.

    The other model's logits, before the division by T, are assumed to differ from these by noise of AGREEMENT_SCALE.
    Its choice then follows the softmax, at that scale, of the perturbed logits: those with the shared noise added. Only
    the shortlist of a row is searched; a candidate missing from it costs acceptance, not correctness. The other rows of
    the call change a row's logprobs only in the last bits.
    """
    known, sound = _processed_shortlists(logits, rows)
    found = Candidates(np.zeros((len(rows), width), dtype=np.int64), np.full((len(rows), width), -np.inf), sound)
    greedy: list[int] = []
    sampled: list[int] = []
    for at, peak in enumerate(known.values[:, 0].tolist()):
        if abs(peak) < MAX_ABS_LOGIT:
            (greedy if rows[at].query.sampler.sampling.greedy else sampled).append(at)
    if greedy:
        own = _places(greedy, len(rows))
        ids = known.ids[own]
        _fill(found, own, known.values[own].astype(np.float64), ids, np.s_[:, :width])  # shortlists are sorted
    if sampled:
        own = _places(sampled, len(rows))
        ids = known.ids[own]
        perturbed = _perturbed(known.values[own], ids, [rows[at].query for at in sampled])
        _fill(found, own, perturbed, ids, (np.arange(len(sampled))[:, None], _ranked(perturbed, width)))
    return found


def with_confidence(children: Candidates, confidence: NDArray[np.float64]) -> Candidates:
    """Return the children of n nodes, best first, after setting the best child's probability to `confidence` [n]. The
    other children share the rest in unchanged proportions. Where a grammar leaves one token, it stays certain."""
    logprobs = children.logprobs.copy()
    uncertain = (logprobs > -np.inf).sum(axis=1) > 1
    uncertain |= (logprobs[:, 0] < 0.0) & (logprobs[:, 0] > -np.inf)  # a single one below 1 has unlisted siblings
    best = np.clip(confidence[uncertain], MIN_CONFIDENCE, 1.0 - MIN_CONFIDENCE)
    before = np.minimum(np.exp(logprobs[uncertain, 0]), 1.0 - MIN_CONFIDENCE)
    logprobs[uncertain] += (np.log1p(-best) - np.log1p(-before))[:, None]
    logprobs[uncertain, 0] = np.log(best)
    order = (-logprobs).argsort(axis=1, kind="stable")
    return children._replace(
        tokens=np.take_along_axis(children.tokens, order, axis=1), logprobs=np.take_along_axis(logprobs, order, axis=1)
    )


def _places(own: list[int], count: int) -> list[int] | slice:
    """Return `own`, indices into `count` rows, as a full slice if it holds all of them, which avoids a copy."""
    return slice(None) if len(own) == count else own


def _processed_shortlists(logits: DraftLogits, rows: Sequence[QueriedRow]) -> tuple[Shortlists, NDArray[np.bool_]]:
    """Return the shortlists of rows after penalties, bias, bans and token masks, and whether the unprocessed logits are
    sound. Shorter rows are padded with logits of -inf."""
    listed = [at for at, row in enumerate(rows) if not row.query.adjusts]
    whole = [at for at, row in enumerate(rows) if row.query.adjusts] if len(listed) < len(rows) else []
    if listed:
        found = logits.shortlists([rows[at].number for at in listed])
        vocabularies = [rows[at].vocabulary for at in listed]
        if found.ids.max() >= min(vocabularies):  # padding of a wider draft: redo these rows from the whole logits
            beyond = found.ids.max(axis=1) >= vocabularies
            whole += [at for at, is_beyond in zip(listed, beyond.tolist(), strict=True) if is_beyond]
        if not whole:
            return found, np.abs(found.values[:, 0]) < MAX_ABS_LOGIT
    values = np.full((len(rows), MAX_DRAFT_LOGITS), -np.inf, dtype=np.float32)
    ids = np.zeros(values.shape, dtype=np.int64)
    if listed:
        count = found.ids.shape[1]
        values[listed, :count], ids[listed, :count] = found
    sound = np.abs(values[:, 0]) < MAX_ABS_LOGIT
    for at, row in zip(whole, logits.whole([rows[at].number for at in whole]), strict=True):
        z = over(rows[at].vocabulary, row)
        sound[at] = abs(z.max()) < MAX_ABS_LOGIT
        values[at] = -np.inf
        if sound[at]:
            own = shortlists(list(adjusted(z[None], [rows[at].query])))
            count = own.ids.shape[1]
            values[at, :count], ids[at, :count] = own.values[0], own.ids[0]
    return Shortlists(values, ids), sound


def over(vocabulary: int, logits: Logits) -> Logits:
    """Return a row of logits resized to a vocabulary that begins with the same tokens: cut, or padded with -inf."""
    if len(logits) >= vocabulary:
        return logits[:vocabulary]
    return np.pad(logits, (0, vocabulary - len(logits)), constant_values=-np.inf)


def _perturbed(values: Logits, ids: NDArray[np.int64], queries: Sequence[SamplingQuery]) -> NDArray[np.float64]:
    """Return the perturbed logits of shortlists [n, k] at temperatures above 0; -inf where truncation removes an id.
    Trailing columns without a survivor in any row are cut off."""
    samplings = [query.sampler.sampling for query in queries]
    z = tempered(values, samplings)
    if any(truncates(sampling) for sampling in samplings):
        totals = np.exp(z - z[:, :1]).sum(axis=1, dtype=np.float64)
        kept = survivors_of_largest(z, ids, totals, z.shape[1], samplings)  # the shortlist counts as the whole row
        columns = int(np.flatnonzero(kept.any(axis=0))[-1]) + 1
        z, ids, kept = z[:, :columns], ids[:, :columns], kept[:, :columns]
    else:
        kept = z > -np.inf
    streams = np.array([[stream_at(query.sampler.state, query.position)] for query in queries], dtype=np.uint64)
    scores = z + word_gumbel(token_words(streams, ids))
    # Multiplied by T again: AGREEMENT_SCALE is the scale of the noise between logits before division by T.
    return np.where(kept, np.array([[sampling.temperature] for sampling in samplings]) * scores, -np.inf)


def _ranked(scores: NDArray[np.float64], width: int) -> NDArray[np.int64]:
    """Return the columns of the `width` largest scores of each row, largest first."""
    falling = -scores
    if scores.shape[1] <= SORTED_WHOLE * width:
        return falling.argsort(axis=1)[:, :width]
    every = np.arange(len(scores))[:, None]
    best = falling.argpartition(width, axis=1)[:, :width]
    return best[every, falling[every, best].argsort(axis=1)]


def _fill(found: Candidates, rows: Any, perturbed: NDArray[np.float64], ids: NDArray[np.int64], ranked: Any) -> None:
    """Write the candidates of these rows. `ranked` indexes their entries, by falling perturbed logit."""
    scores = perturbed / AGREEMENT_SCALE
    best = scores[ranked]
    # Logprobs are a softmax over the whole shortlist, not over the `width` best alone.
    log_totals = np.log(np.exp(scores - best[:, :1]).sum(axis=1, keepdims=True)) + best[:, :1]
    found.tokens[rows, : best.shape[1]] = ids[ranked]
    found.logprobs[rows, : best.shape[1]] = best - log_totals
