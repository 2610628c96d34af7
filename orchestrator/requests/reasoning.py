"""Reasoning: the model's thoughts before its answer, between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.text.tokenizer import Tokenizer
from specdec.v2 import generation_pb2, model_pb2

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The marks of Qwen 3, QwQ and DeepSeek R1's distillations, and of Magistral since release 2507."""


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of one text: it ends with the token `closing`. If it has `begun`, it starts in the prompt. Else the
    text has reasoning only if it starts with `opening`, after white space at most."""

    opening: int
    closing: int
    begun: bool = False

    def before(self, grammar: model_pb2.Grammar) -> model_pb2.Grammar:
        """Return the grammar restricted to the answer, unless it already names its own start."""
        if grammar.HasField("after_token") or grammar.HasField("opening_token"):
            return grammar
        found = model_pb2.Grammar()
        found.CopyFrom(grammar)
        found.after_token = self.closing
        if not self.begun:
            found.opening_token = self.opening
        return found


def marks_of(tokenizer: Tokenizer) -> Reasoning | None:
    """Return the reasoning marks of a model; None if its chat template has none of `MARKS`, or if they are not single
    tokens."""
    templates = tokenizer.chat_templates
    for opening, closing in MARKS if templates is not None else ():
        first, last = tokenizer.added_token(opening), tokenizer.added_token(closing)
        if first is not None and last is not None and templates is not None and templates.mentions(closing):
            return Reasoning(first, last)
    return None


def reasoning_after(prompt: Sequence[int], marks: Reasoning, tokenizer: Tokenizer) -> Reasoning | None:
    """Return the reasoning of a chat's next text; None if its prompt ends with the closing mark: templates write it to
    skip the reasoning."""
    for token in reversed(prompt):
        if token == marks.closing:
            return None
        if token == marks.opening:
            return Reasoning(marks.opening, marks.closing, begun=True)
        if not tokenizer.piece(token).isspace():
            break
    return marks


def reasoning_from(message: generation_pb2.Reasoning) -> Reasoning | None:
    """Return the reasoning in a message; None if `none` is set."""
    return None if message.none else Reasoning(message.opening_token, message.closing_token, message.begun)


def reasoning_message(reasoning: Reasoning | None) -> generation_pb2.Reasoning:
    if reasoning is None:
        return generation_pb2.Reasoning(none=True)
    return generation_pb2.Reasoning(
        opening_token=reasoning.opening, closing_token=reasoning.closing, begun=reasoning.begun
    )
