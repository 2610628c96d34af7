"""The text of one sample: its reasoning, if it has any, then its answer, each detokenised incrementally."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.requests.sample import Sample
from orchestrator.text.detokenizer import TextStream
from orchestrator.text.stop_strings import Spelt
from specdec.text.tokenizer import Tokenizer

MAX_SPACE_BEFORE_MARK = 8
"""Tokens of white space after which no reasoning can begin. Models write one or two line breaks at most, and the client
does not get them before the next token."""


class SampleText:
    """Detokenises one sample. Marks of reasoning are not shown; stop strings are searched for in the answer alone.
    White space around the opening mark and after the closing one is dropped. With a grammar the answer keeps its white
    space, and there is reasoning only if the mark is the first token: the grammar holds for all other texts."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        reasoning = sample.reasoning
        self._opening = None if reasoning is None or reasoning.begun else reasoning.opening  # if only space precedes it
        self._closing = reasoning.closing if reasoning is not None and reasoning.begun else None  # in reasoning only
        self._stream = (
            TextStream(tokenizer, sample.prompt, sample.stop, sample.shown_tokens)
            if self._closing is None
            else TextStream(tokenizer, sample.prompt, (), drops_space=True)
        )
        self._ending = {
            token: stop
            for stop in sample.stop
            if (token := tokenizer.added_token(stop)) is not None and token in sample.end_tokens
        }
        self.reasoning_tokens = 0
        """Tokens of the reasoning so far, including its marks."""

    def take_space(self, tokens: Sequence[int]) -> int | None:
        """Take the white space before the opening mark, if these tokens continue with the mark; return its number of
        tokens, 0 if no mark follows. Return None, without taking anything, if only later tokens can decide. Called
        until it is known."""
        if self._opening is None:
            return 0
        most = 0 if self._sample.grammar is not None else MAX_SPACE_BEFORE_MARK
        for count, token in enumerate(tokens):
            if token == self._opening:
                self.reasoning_tokens += count
                return count
            if count == most or not self._tokenizer.piece(token).isspace():
                self._opening = None
                return 0
        return None

    def push(self, token: int) -> Spelt:
        """Take a token; return the text it completes."""
        if token == self._opening:
            self._open()
            return Spelt("")
        self.reasoning_tokens += self._closing is not None
        if token != self._closing:
            return self._stream.push(token)
        spelt, sample = self._stream.finish(), self._sample
        self._closing = None
        drops = sample.grammar is None
        self._stream = TextStream(self._tokenizer, [], sample.stop, sample.shown_tokens, mark=token, drops_space=drops)
        return spelt

    def end(self, token: int) -> Spelt:
        """Take the end token, without showing it; return the text it completes, and the stop string it is or completes,
        if any."""
        self.reasoning_tokens += self._closing is not None
        spelt = self._stream.end(token)
        if spelt.stop or token not in self._ending:
            return spelt
        return Spelt(spelt.text + self._stream.finish().text, self._ending[token])

    def finish(self) -> Spelt:
        """Return the text held back, to be shown with the last token; called after the last token."""
        return self._stream.finish()

    def _open(self) -> None:
        assert self._sample.reasoning is not None
        self._opening, self._closing = None, self._sample.reasoning.closing
        self._stream = TextStream(self._tokenizer, [], (), drops_space=True)
        self.reasoning_tokens += 1
