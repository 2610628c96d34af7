"""Drafts with another tokenizer than their target's: translates texts from the target's tokens to the draft's, and
logits over the draft's tokens to logits over the target's.

Tokens with the same bytes in both vocabularies are the *common* ones. Only these are proposed, with the draft's
distribution renormalised over them (token-level intersection, TLI: Timor et al. 2025, arXiv:2502.05202, algorithm 4).
Noise is looked up by the target's id, so under COUPLED these candidates agree with the target's choices as often as
those of any draft with this distribution.

A prompt is decoded by the target's tokenizer and encoded by the draft's. Later tokens are translated one by one: a
common token to its counterpart, any other to the longest draft tokens that spell its bytes. A candidate is one token in
both vocabularies, so the draft's KV cache of accepted candidates stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.draft_logits import DraftLogits, Shortlists
from specdec.decoding.processing import Logits
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from specdec.text.special_tokens import special_tokens
from specdec.text.tokenizer import Tokenizer

PROBES = ("A Word, naïve café: 12.5 %", "def f(x):\n    return x\t# é", "one  two   three", "日本語 🙂")
"""Texts that a tokenizer must reproduce: a normaliser that lowercases, strips accents or merges white space would
change every prompt."""


class Translation:
    """The translation between the tokens of a draft and of its target."""

    def __init__(self, draft: ModelDirectory, target: ModelDirectory) -> None:
        """Raise UnsupportedModelError if a tokenizer changes texts, or if no token is common."""
        self.vocabulary = target.vocabulary
        """The target's vocabulary size."""
        self._draft, self._target = Tokenizer(draft), Tokenizer(target)
        for directory, tokenizer in ((draft, self._draft), (target, self._target)):
            _check_unchanged(directory, tokenizer)
        self._ids = _by_bytes(self._draft, draft.vocabulary)
        targets = _by_bytes(self._target, target.vocabulary)
        common = {targets[piece]: token for piece, token in self._ids.items() if piece in targets}
        # Special tokens match only special tokens: their text within a prompt is ordinary text.
        own = _special_by_text(self._draft, draft.vocabulary)
        theirs = _special_by_text(self._target, target.vocabulary)
        common |= {theirs[text]: token for text, token in own.items() if text in theirs}
        if not common:
            raise UnsupportedModelError(
                f"{draft.path}: its tokenizer has no token in common with that of {target.path}"
            )
        self.common = common
        """The draft's ids of the common tokens, by the target's."""
        self._to_target = np.full(draft.vocabulary, -1, dtype=np.int64)
        self._to_target[list(common.values())] = list(common)
        self._own = np.flatnonzero(self._to_target >= 0)
        self._longest = max(map(len, self._ids), default=0)
        self._spelled: dict[int, tuple[int, ...]] = {}
        begin = special_tokens(target).get("bos_token")
        self._begin = None if begin is None else self._target.special_token(begin)
        (self._unspelled, *_) = self._draft.encode(" ", special=False)

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt in the draft's tokens, with the tokens that its tokenizer adds to a text, such as a BOS
        token. Never empty. Characters that the last tokens leave incomplete become U+FFFD."""
        begins = bool(tokens) and tokens[0] == self._begin
        text = self._target.decode(tokens[1:] if begins else tokens, special=True)
        own = self._draft.encode(text) or [self._unspelled]
        size = len(self._to_target)
        if max(own) < size:
            return own
        # A tokenizer may have special tokens beyond the model's vocabulary, and a prompt may spell them.
        beyond = {token: self._longest_pieces(self._draft.piece(token)) for token in set(own) if token >= size}
        return [piece for token in own for piece in beyond.get(token, (token,))]

    def spelled(self, tokens: Iterable[int]) -> list[int]:
        """Return these tokens of the target in the draft's tokens: at least one for each."""
        return [own for token in tokens for own in self._spelling(token)]

    def logits(self, logits: DraftLogits) -> DraftLogits:
        """Return the draft's logits over the target's vocabulary; -inf for tokens that are not common."""
        return _Translated(logits, self._to_target, self._own, self.vocabulary)

    def _spelling(self, token: int) -> tuple[int, ...]:
        own = self.common.get(token)
        if own is not None:
            return (own,)
        known = self._spelled.get(token)
        if known is None:
            known = self._spelled[token] = self._longest_pieces(self._target.piece(token))
        return known

    def _longest_pieces(self, piece: bytes) -> tuple[int, ...]:
        """Spell bytes greedily: from the left, always with the longest token. Bytes without a token are left out."""
        found: list[int] = []
        place = 0
        while place < len(piece):
            ends = range(min(len(piece), place + self._longest), place, -1)
            end = next((end for end in ends if piece[place:end] in self._ids), None)
            if end is not None:
                found.append(self._ids[piece[place:end]])
            place = end or place + 1
        return tuple(found) or (self._unspelled,)


class _Translated:
    """Draft logits whose ids are the target's."""

    def __init__(
        self, logits: DraftLogits, to_target: NDArray[np.int64], own: NDArray[np.int64], vocabulary: int
    ) -> None:
        self._logits = logits
        self._to_target = to_target  # -1 for the draft's tokens that the target lacks
        self._own = own  # the other tokens of the draft
        self._vocabulary = vocabulary

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        found = self._logits.shortlists(rows)
        ids = self._to_target[found.ids]
        # Common tokens first, in their order; the others are padding.
        order = np.argsort(ids < 0, axis=1, kind="stable")
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(found.values, order, 1)
        missing = ids < 0
        values[missing], ids[missing] = -np.inf, 0
        return Shortlists(values, ids)

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        translated = np.full((len(rows), self._vocabulary), -np.inf, dtype=np.float32)
        for place, row in enumerate(self._logits.whole(rows)):
            translated[place, self._to_target[self._own]] = row[self._own]
        return list(translated)


def _by_bytes(tokenizer: Tokenizer, vocabulary: int) -> dict[bytes, int]:
    """Return the tokens below `vocabulary` that are not special, by their bytes. Of several with the same bytes, the
    first that is not a byte token is preferred."""
    special, characters = tokenizer.special_tokens, tokenizer.characters()
    found: dict[bytes, int] = {}
    for token in range(vocabulary):
        piece = tokenizer.piece(token)
        if not piece or token in special:
            continue
        known = found.get(piece)
        if known is None or (characters.is_byte(known) and not characters.is_byte(token)):
            found[piece] = token
    return found


def _special_by_text(tokenizer: Tokenizer, vocabulary: int) -> dict[bytes, int]:
    """Return the special tokens below `vocabulary` by their texts."""
    return {tokenizer.piece(token): token for token in tokenizer.special_tokens if token < vocabulary}


def _check_unchanged(directory: ModelDirectory, tokenizer: Tokenizer) -> None:
    """Raise UnsupportedModelError unless a tokenizer reproduces `PROBES`."""
    for text in PROBES:
        given_back = tokenizer.decode(tokenizer.encode(text, special=False))
        if given_back != text:
            raise UnsupportedModelError(
                f"{directory.path}: its tokenizer turns {text!r} into {given_back!r}; if draft and target have "
                "different tokenizers, both must reproduce texts unchanged"
            )
