"""Detokenisation: turns tokens into text as they come, in whole characters, and up to a stop string.

The result is a pure function of the token sequence, however it was split: a resumed request replays its generated
tokens here, and continues exactly where the text broke off.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.text.stop_strings import Spelt, StopStrings
from specdec.text.tokenizer import Tokenizer

CONTEXT = 8
"""Earlier tokens decoded with new ones: what a token spells depends on whether it begins the text."""

SEARCHED = 4096
"""Tokens at the end of a prompt to search for the context: special tokens and bytes of an unfinished run do not
count."""


class Detokenizer:
    """An incremental decoder: the pieces joined equal the library's decoding of all tokens at once, and no piece
    changes later. Tokens are held back until they make whole characters (`Characters`); special tokens are skipped."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], shown: frozenset[int] = frozenset()) -> None:
        """`shown` are the special tokens to be spelt. If the prompt ends inside a character, the text begins with
        it."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._characters = tokenizer.characters()
        context: list[int] = []
        found = whole = 0
        for token in reversed(prompt[-SEARCHED:]):
            if tokenizer.is_spelt(token):
                context.append(token)
                found += not self._characters.is_byte(token)
                if found == CONTEXT:
                    break
        context.reverse()
        for count, token in enumerate(context, 1):
            if self._characters.whole_after(token):
                whole = count
        self._context = context[:whole]  # makes whole characters
        self._pending, broken = self._characters.left_open(context[whole:])  # not yet spelt
        self._spelt = len(tokenizer.decode(self._context + self._pending)) - broken  # characters not to return again

    def push(self, token: int) -> str:
        """Return the text this token completes; empty while a character is incomplete."""
        if token in self._shown:
            text = self.flush() + self._tokenizer.piece(token).decode(errors="replace")
            self._characters = self._tokenizer.characters()
            self._context, self._spelt = [], 0
            return text
        if not self._tokenizer.is_spelt(token):
            return ""
        self._pending.append(token)
        return self._spell() if self._characters.whole_after(token) else ""

    def flush(self) -> str:
        """Return the rest at the end, complete characters or not."""
        return self._spell() if self._pending else ""

    def _spell(self) -> str:
        """Return the text of the pending tokens after their context, and make them the context."""
        new = self._tokenizer.decode(self._context + self._pending)[self._spelt :]
        if new or not self._spelt:
            # Tokens that spell nothing alone (a space dropped at the beginning) cannot serve as context.
            alone = self._tokenizer.decode(self._pending[-CONTEXT:])
            self._context = (self._pending if alone else self._context + self._pending)[-CONTEXT:]
            self._spelt = len(alone or self._tokenizer.decode(self._context))
        self._pending = []
        return new


class TextStream:
    """The detokenizer and stop strings of one sample."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        shown: frozenset[int] = frozenset(),
        *,
        mark: int | None = None,
        drops_space: bool = False,
    ) -> None:
        """`shown` are the special tokens to be spelt. `mark` is a hidden token before the text. With `drops_space`,
        white space at the beginning is dropped."""
        self._tokenizer = tokenizer
        self._drops_space = drops_space
        self._detokenizer = Detokenizer(tokenizer, prompt, shown)
        self._shown = shown
        unshown = "" if mark is None else self._text_of(mark)
        self._stop = StopStrings(stop, tokenizer, unshown)
        self._stop.pass_over(unshown)

    def push(self, token: int) -> Spelt:
        spelt = self._release(self._detokenizer.push(token))
        is_spelt = token in self._shown or self._tokenizer.is_spelt(token)
        return spelt if spelt.stop or is_spelt else self._pass_over(token, spelt.text)

    def end(self, token: int) -> Spelt:
        """Return the text held back before the end token. The token is not shown, but may complete a stop string."""
        spelt = self._release(self._detokenizer.flush())
        return spelt if spelt.stop else self._pass_over(token, spelt.text)

    def finish(self) -> Spelt:
        """Return the text held back; called after the last token."""
        spelt = self._release(self._detokenizer.flush())
        return spelt if spelt.stop else Spelt(spelt.text + self._stop.rest())

    def _pass_over(self, token: int, before: str) -> Spelt:
        spelt = self._stop.pass_over(self._text_of(token))
        return Spelt(before + spelt.text, spelt.stop)

    def _release(self, new: str) -> Spelt:
        if self._drops_space and new:
            left = new.lstrip()
            self._drops_space = not left
            if (spelt := self._stop.pass_over(new[: len(new) - len(left)])).stop:
                return spelt
            new = left
        return self._stop.add(new)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.piece(token).decode(errors="replace")
