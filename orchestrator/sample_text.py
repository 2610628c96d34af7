"""The text of one sample: its reasoning, if it has one, and then its answer, each spelt as its tokens come."""

from __future__ import annotations

from orchestrator.sample import Sample
from orchestrator.text import Spelt, TextStream
from specdec.text.tokenizer import Tokenizer


class SampleText:
    """Spells the tokens of one sample. Marks of reasoning are not spelt; stop strings are looked for in the answer
    alone. White space behind marks is dropped, but of an answer that a grammar is about."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        reasoning = sample.reasoning
        self._opening = None if reasoning is None or reasoning.begun else reasoning.opening  # if it is the next token
        self._closing = reasoning.closing if reasoning is not None and reasoning.begun else None  # in reasoning only
        self._stream = (
            TextStream(tokenizer, sample.prompt, sample.stop, sample.shown_tokens)
            if self._closing is None
            else TextStream(tokenizer, sample.prompt, (), behind_mark=True)
        )
        self.reasoning_tokens = 0
        """Tokens so far that belong to the reasoning, its marks included."""

    def push(self, token: int) -> Spelt:
        """Take a token; return what it made readable."""
        opens, self._opening = token == self._opening, None
        if opens:
            assert self._sample.reasoning is not None
            self._closing = self._sample.reasoning.closing
            self._stream = TextStream(self._tokenizer, [], (), behind_mark=True)
        self.reasoning_tokens += self._closing is not None
        if opens:
            return Spelt("")
        if token != self._closing:
            return self._stream.push(token)
        spelt, sample = self._stream.finish(), self._sample
        self._closing = None
        drops = sample.grammar is None
        self._stream = TextStream(self._tokenizer, [], sample.stop, sample.shown_tokens, behind_mark=drops)
        return spelt

    def end(self) -> None:
        """Take the end token, which is not spelt."""
        self.reasoning_tokens += self._closing is not None

    def finish(self) -> Spelt:
        """Return what was held back, as a part of what the last token made readable; called at the end of the
        tokens."""
        return self._stream.finish()
