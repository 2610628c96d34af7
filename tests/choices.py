"""Single-row interface to the choice rule for tests: the token, the values it maximises, and the noise in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.candidates import QueriedRow, draft_candidates
from specdec.decoding.choice import Tokens, choose
from specdec.decoding.draft_logits import HostDraftLogits
from specdec.decoding.noise import stream, token_words, word_gumbel
from specdec.decoding.processing import Logits, adjusted, tempered
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery, TokenMask
from specdec.decoding.truncation import survivors


def choose_token(
    sampler: RequestSampler,
    logits: Logits,
    position: int,
    penalty_state: PenaltyState | None = None,
    path: Sequence[int] = (),
    allowed: TokenMask | None = None,
    ruled_out: Sequence[int] = (),
) -> int:
    """Return the token chosen for one row, float32 [V]."""
    query = SamplingQuery(sampler, position, penalty_state, path, allowed=allowed, ruled_out=ruled_out)
    return int(choose(logits[None], [query])[0])


def mask_of(tokens: Collection[int], vocabulary: int) -> TokenMask:
    return np.packbits([token in tokens for token in range(vocabulary)], bitorder="little")


def choose_tokens(logits: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Return the tokens chosen for one row, float32 [V], by each query, in one call."""
    return choose(np.repeat(logits[None], len(queries), axis=0), queries)


def scores(logits: Logits, query: SamplingQuery) -> tuple[Tokens, NDArray[np.float64]]:
    """Return ascending token ids and the values whose argmax is the choice for one row (COUPLED): logits, with noise
    unless greedy. Ids that do not survive are missing or -inf."""
    sampling = query.sampler.sampling
    z = adjusted(logits[None], [query])
    if sampling.greedy:
        return np.arange(len(logits)), z[0].astype(np.float64)
    z = tempered(z, [sampling])
    ids = survivors(z[0], sampling)
    return ids, z[0, ids] + gumbel(sampling.seed, query.position, ids)


def words(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return uint64 [n]: the raw word of each token id at an absolute position."""
    return token_words(np.array([stream(seed, position)], dtype=np.uint64), ids)


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64 [n]: the standard Gumbel noise of each token id at an absolute position."""
    return word_gumbel(words(seed, position, ids))


def candidates(row: NDArray[np.float32], query: SamplingQuery, width: int) -> tuple[list[int], list[float]]:
    """Return the candidates of one row and their logprobs."""
    found = draft_candidates(HostDraftLogits(row[None]), [QueriedRow(0, query, len(row))], width)
    count = int(np.count_nonzero(found.logprobs > -np.inf))
    return found.tokens[0, :count].tolist(), found.logprobs[0, :count].tolist()
