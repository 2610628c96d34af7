"""Where a text stands in its grammar: which tokens may follow it, or follow candidates below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.decoding.token_mask import TokenMask
from specdec.grammar.grammar import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class TextGrammar:
    """The state of one text in its grammar. One thread uses it.

    A pure function of the text: what was asked about candidates meanwhile changes nothing. `error` is set once the
    grammar has become too complex to go on, or the text has left it; from then on nothing is ruled out.

    The library's matcher is moved along the token tree, down by the tokens of a path and back up by a rollback, so
    that asking depth first costs a token at a time.
    """

    def __init__(
        self, matcher: LLMatcher, after_token: int | None, end_tokens: frozenset[int], vocabulary: int
    ) -> None:
        """`matcher` stands at the beginning of the grammar; the text is free until `after_token`, if there is one."""
        self.error: GrammarError | None = None
        self._matcher = matcher
        self._awaited = after_token  # the token that the grammar begins after; None: it has begun
        self._end_tokens = end_tokens
        self._vocabulary = vocabulary
        self._ends = np.array(sorted(end_tokens), dtype=np.int64)
        self._ahead: list[int] = []  # tokens that the matcher has taken beyond the committed text
        # Of the present text: masks by path, and what is forced.
        self._masks: dict[tuple[int, ...], TokenMask | None] = {}
        self._forced: list[int] | None = None

    def commit(self, tokens: Sequence[int]) -> None:
        """Follow the text by tokens that have become final."""
        if tokens and tokens[-1] in self._end_tokens:
            tokens = tokens[:-1]  # the text is over
        below = self._constrained(tokens)
        self._masks.clear()
        self._forced = None
        if below is None or self.error is not None:
            return
        self._awaited = None
        if not self._reach(below) and self.error is None:
            at = len(tokens) - len(below) + len(self._ahead)
            self.error = GrammarError(f"the text leaves its grammar at its token {at}")
        self._ahead = []

    def allowed(self, path: Sequence[int]) -> TokenMask | None:
        """Return the tokens that may come next after the committed text and a path of candidates; None if all may.
        A path that the grammar rules out leads nowhere: None as well."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(path)
        return self._masks[key]

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Return whether a token may come next after the committed text and a path of candidates."""
        below = self._constrained(path)
        if below is None or self.error is not None:
            return True
        if not self._reach(below):
            return False
        if token in self._end_tokens and self._matcher.is_accepting():
            return True
        return self._matcher.validate_tokens([token]) == 1

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces after the committed text, as the tokenizer writes them; at the end
        of the grammar the end token, if there is one alone. They are candidates: the bytes are forced, and a model may
        write them by other tokens."""
        if self._forced is None:
            self._forced = self._find_forced()
        return self._forced

    def _find_forced(self) -> list[int]:
        if self._awaited is not None or self.error is not None or not self._reach([]):
            return []
        found = [token for token in self._matcher.compute_ff_tokens() if token < self._vocabulary]
        self._reach(found)
        found = list(self._ahead)
        if len(self._end_tokens) == 1 and self._matcher.is_stopped() and self._matcher.is_accepting():
            found += self._end_tokens
        self._check()
        return found

    def _mask(self, path: Sequence[int]) -> TokenMask | None:
        below = self._constrained(path)
        if below is None or self.error is not None or not self._reach(below):
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: -(-self._vocabulary // 8)].copy()
        if not self._check():
            return None
        if self._vocabulary % 8:
            mask[-1] &= (1 << self._vocabulary % 8) - 1  # the library's own end token is not among ours
        if self._matcher.is_accepting():
            np.bitwise_or.at(mask, self._ends // 8, (1 << (self._ends % 8)).astype(np.uint8))
        return mask

    def _constrained(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path that the grammar is about; None if it has not begun at its end."""
        if self._awaited is None:
            return path
        return path[path.index(self._awaited) + 1 :] if self._awaited in path else None

    def _reach(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path below the committed text; False if the path cannot be gone."""
        common = 0
        while common < min(len(path), len(self._ahead)) and path[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        rest = list(path[common:])
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._ahead += rest[:taken]
        return self._check() and taken == len(rest)

    def _check(self) -> bool:
        """Return whether the matcher works; what is wrong with it is kept."""
        if self.error is None and self._matcher.is_error():
            self.error = GrammarError("the grammar is too complex for this text")
        return self.error is None
