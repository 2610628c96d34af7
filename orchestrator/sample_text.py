"""The text of one sample: its reasoning, if it has one, and then its answer, each spelt as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sample import Sample
from orchestrator.text import Spelt, TextStream
from specdec.text.tokenizer import Tokenizer


class SampleText:
    """Spells the tokens of one sample. Marks of reasoning are not spelt, nor is white space behind them; stop strings
    are looked for in the answer alone."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self._marks = sample.reasoning
        self._in_reasoning = self._marks is not None and self._marks.begun
        self._stream = self._reasoning(sample.prompt) if self._in_reasoning else self._answer(sample.prompt)
        self._begun = False
        self.reasoning_tokens = 0
        """Tokens so far that belong to the reasoning, its marks included."""

    def push(self, token: int) -> Spelt:
        """Take a token; return what it made readable."""
        may_open, self._begun = not self._begun and not self._in_reasoning, True
        if self._marks is None:
            return self._stream.push(token)
        if may_open and token == self._marks.begin:
            self._in_reasoning, self._stream = True, self._reasoning([])
            self.reasoning_tokens += 1
            return Spelt("")
        if not self._in_reasoning:
            return self._stream.push(token)
        self.reasoning_tokens += 1
        if token != self._marks.end:
            return self._stream.push(token)
        spelt = self._stream.finish()
        self._in_reasoning, self._stream = False, self._answer([], behind_mark=True)
        return spelt

    def end(self) -> None:
        """Take the end token, which is not spelt."""
        self.reasoning_tokens += self._in_reasoning

    def finish(self) -> Spelt:
        """Return what was held back, as a part of what the last token made readable; called at the end of the
        tokens."""
        return self._stream.finish()

    def _reasoning(self, before: Sequence[int]) -> TextStream:
        return TextStream(self._tokenizer, before, (), behind_mark=True)

    def _answer(self, before: Sequence[int], *, behind_mark: bool = False) -> TextStream:
        sample = self._sample
        return TextStream(self._tokenizer, before, sample.stop, sample.shown_token, behind_mark=behind_mark)
