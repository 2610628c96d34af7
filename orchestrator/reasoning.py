"""Reasoning: what a model thinks before it answers, between two tokens that mark it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from specdec.text.tokenizer import Tokenizer
from specdec.v2 import model_pb2

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The marks of Qwen 3, QwQ and DeepSeek R1's distillations, and of Magistral."""


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of one answer: it ends with the token `end`, and begins in the prompt or, if at all, with the token
    `begin` as the first one."""

    begin: int
    end: int
    begun: bool

    def before(self, grammar: model_pb2.Grammar) -> model_pb2.Grammar:
        """Return a grammar that holds for what follows the reasoning."""
        found = model_pb2.Grammar(after_token=self.end)
        if not self.begun:
            found.opening_token = self.begin
        found.MergeFrom(grammar)
        return found


@dataclass(frozen=True)
class ReasoningMarks:
    """The tokens between which a model reasons."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return the marks of a model; None if its chat template knows none of `MARKS`, or they are not tokens."""
        for begin, end in MARKS:
            first, last = tokenizer.added_token(begin), tokenizer.added_token(end)
            if first is not None and last is not None and end in (tokenizer.template_source or ""):
                return cls(first, last)
        return None

    def after(self, prompt: Sequence[int], tokenizer: Tokenizer) -> Reasoning | None:
        """Return the reasoning of the answer to a prompt; None if the prompt has told the model not to reason, by
        marks with nothing in between."""
        for token in reversed(prompt):
            if token == self.end:
                return None
            if token == self.begin:
                return Reasoning(self.begin, self.end, begun=True)
            if not tokenizer.piece(token).isspace():
                break
        return Reasoning(self.begin, self.end, begun=False)
