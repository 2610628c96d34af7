"""The state of a text in its grammar: the tokens that may follow the text or candidates below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.decoding.query import TokenMask
from specdec.grammar.grammar import MAX_PROBLEM_CHARACTERS, Grammar, GrammarError, GrammarTooComplexError

if TYPE_CHECKING:
    from llguidance import LLMatcher


REFUEL = 16
"""Number of tokens after which a mask is computed: the library limits its lexer's work since the last mask."""


class TextGrammar:
    """The state of one text in its grammar. Used by one thread.

    It is a pure function of the text until the library's limits are reached: queries about candidates do not change it.

    One of the library's matchers is at the end of the committed text. A copy of it moves along the token tree: down by
    consuming the tokens of a path, up by rollback. So depth-first queries cost one token each.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        end_tokens: frozenset[int],
        vocabulary: int,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        """`matcher` is at the start of the grammar; `grammar` defines where in the text that is. `on_limit` is called
        when one of the library's limits is reached."""
        self._on_limit = on_limit
        self.error: GrammarError | None = None
        """Why the grammar is no longer followed: it is too complex, or the text has left it."""
        self._matcher = matcher
        self._awaited = grammar.after_token  # the grammar starts after this token; None: it has started
        self._opening = grammar.opening_token  # only a text that begins with this is free at first; None: any text
        self._end_tokens = end_tokens
        self._vocabulary = vocabulary
        self._ends = np.array(sorted(end_tokens), dtype=np.int64)
        self._free = np.full(-(-vocabulary // 8), 0xFF, np.uint8)  # before the grammar: all tokens except end tokens
        np.bitwise_and.at(self._free, self._ends // 8, (~(1 << (self._ends % 8)) & 0xFF).astype(np.uint8))
        self._ahead_matcher = matcher.deep_copy()
        self._ahead: list[int] = []  # tokens consumed by the copy beyond the committed text
        # Caches for the current text: masks by path, and the forced tokens.
        self._masks: dict[tuple[int, ...], TokenMask | None] = {}
        self._forced: list[int] | None = None

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that have become final."""
        if tokens and tokens[-1] in self._end_tokens:
            tokens = tokens[:-1]  # the text is over
        if not tokens:
            return
        below = self._constrained(tokens)
        self._opening = None
        self._masks.clear()
        self._forced = None
        if below is None or self.error is not None:
            return
        self._awaited = None
        taken = self._follow(below)
        if self._matcher.is_error():
            self.error = self._too_complex(self._matcher)
        elif taken < len(below):
            self.error = GrammarError(f"the text violates its grammar at token {len(tokens) - len(below) + taken}")
        self._restart()

    def allowed(self, path: Sequence[int]) -> TokenMask | None:
        """Return the tokens that may follow the committed text and a path of candidates; None if the path itself is
        excluded. GrammarError if the grammar is too complex to decide."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(path)
        return self._masks[key]

    def hint(self, path: Sequence[int]) -> TokenMask | None:
        """Return the result of `allowed`, for proposers; None also if the grammar is too complex to decide."""
        try:
            return self.allowed(path)
        except GrammarError:
            return None

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Return True if a token may follow the committed text and a path of candidates, or if the grammar is too
        complex to decide."""
        below = self._constrained(path)
        if below is None:
            return token not in self._end_tokens
        if self.error is not None or (token == self._opening and not path):
            return True
        try:
            if not self._reach(below):
                return False
            if token in self._end_tokens and self._ahead_matcher.is_accepting():
                return True
            permitted = self._ahead_matcher.validate_tokens([token]) == 1
            self._check()
        except GrammarError:
            return True
        return permitted

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces after the committed text, in the tokenizer's own spelling. At the
        end of the grammar, return the end token if there is only one. The tokens are only candidates: the bytes are
        forced, but a model may tokenize them differently."""
        if self._forced is None:
            try:
                self._forced = self._find_forced()
            except GrammarError:
                self._forced = []
        return self._forced

    def _find_forced(self) -> list[int]:
        if self._awaited is not None or self.error is not None or not self._reach([]):
            return []
        found = [token for token in self._ahead_matcher.compute_ff_tokens() if token < self._vocabulary]
        self._reach(found)
        found = list(self._ahead)
        if len(self._end_tokens) == 1 and self._ahead_matcher.is_stopped() and self._ahead_matcher.is_accepting():
            found += self._end_tokens
        return found

    def _mask(self, path: Sequence[int]) -> TokenMask | None:
        if self.error is not None:
            raise self.error
        below = self._constrained(path)
        if below is None:
            return self._free
        if not self._reach(below):
            return None
        mask = np.frombuffer(self._ahead_matcher.compute_bitmask(), np.uint8)[: -(-self._vocabulary // 8)].copy()
        self._check()
        if self._vocabulary % 8:
            mask[-1] &= (1 << self._vocabulary % 8) - 1  # clear the library's artificial end token
        if self._ahead_matcher.is_accepting():
            np.bitwise_or.at(mask, self._ends // 8, (1 << (self._ends % 8)).astype(np.uint8))
        if self._opening is not None and not path:
            mask[self._opening // 8] |= 1 << self._opening % 8
        return mask

    def _constrained(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path that is subject to the grammar; None if the grammar starts after the path."""
        if self._awaited is None or (self._opening is not None and (not path or path[0] != self._opening)):
            return path
        return path[path.index(self._awaited) + 1 :] if self._awaited in path else None

    def _reach(self, path: Sequence[int]) -> bool:
        """Move the copy to the end of a path below the committed text; False if the path leaves the grammar.
        GrammarError if the grammar is too complex to decide."""
        common = 0
        while common < min(len(path), len(self._ahead)) and path[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            behind = len(self._ahead) - common
            del self._ahead[common:]
            if not self._ahead_matcher.rollback(behind) or self._ahead_matcher.is_error():
                self._restart()  # some of the library's extensions do not support rollback
        rest = list(path[len(self._ahead) :])
        taken = self._ahead_matcher.try_consume_tokens(rest) if rest else 0
        self._check()
        self._ahead += rest[:taken]
        return taken == len(rest)

    def _restart(self) -> None:
        """Reset the copy to the end of the committed text."""
        self._ahead_matcher, self._ahead = self._matcher.deep_copy(), []

    def _check(self) -> None:
        """If the copy has failed, replace it and raise GrammarError."""
        if self._ahead_matcher.is_error():
            error = self._too_complex(self._ahead_matcher)
            self._restart()
            raise error

    def _follow(self, tokens: Sequence[int]) -> int:
        """Advance along the committed text; return how many tokens match."""
        taken = 0
        while taken < len(tokens):
            piece = list(tokens[taken : taken + REFUEL])
            fits = self._matcher.try_consume_tokens(piece)
            taken += fits
            if fits < len(piece) or self._matcher.is_error():
                break
            if taken < len(tokens):  # only in a resumed text: originally, every step computed a mask
                self._matcher.compute_bitmask()
        return taken

    def _too_complex(self, matcher: LLMatcher) -> GrammarError:
        """Return the error for a grammar that exceeds the work limits, with the library's message."""
        self._on_limit()
        (line, *_) = matcher.get_error().splitlines() or [""]
        return GrammarTooComplexError(f"the grammar is too complex for this text: {line[:MAX_PROBLEM_CHARACTERS]}")
