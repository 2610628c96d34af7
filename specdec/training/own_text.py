"""The tokens that a draft learns from, including text that the target writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.training.files import TEXTS, read_tensors, write_texts
from specdec.training.plan import Plan
from specdec.training.texts import PROMPT_TOKENS, Mixture, TextError, Windows, continuations


@dataclass
class TrainingText:
    """The tokens of a training."""

    given: Tensor  # int64 [n]
    replay: Tensor  # int64 [m], older; may be empty
    own: Tensor  # int64 [texts, length], written by the target so far
    in_memory: bool = False  # `save` writes nothing

    @classmethod
    def kept(cls, out: Path) -> TrainingText:
        """Return the tokens kept by `save`."""
        kept = read_tensors(out / TEXTS)
        return cls(kept["tokens"], kept["replay"], kept["own"])

    def save(self, out: Path) -> None:
        if not self.in_memory:
            write_texts(out, self.given, replay=self.replay, own=self.own)

    def check(self, length: int, vocabulary: int) -> None:
        """Raise TextError unless the given text, and the replay text if any, each fill two windows of `length` tokens,
        and all tokens are below `vocabulary`."""
        for option, tokens in (("--text", self.given), ("--replay", self.replay)):
            if not len(tokens) and option == "--replay":
                continue
            if len(tokens) < 2 * length:
                raise TextError(f"{option}: has {len(tokens)} tokens, must have at least {2 * length}: two windows")
            if (highest := int(tokens.max())) >= vocabulary:
                raise TextError(f"{option}: has the token {highest}, but the draft's vocabulary has {vocabulary} ids")

    def mixture(self, length: int, vocabulary: int, share: float) -> Mixture:
        """Return the windows to train on, a `share` of them from `replay`."""
        own = self.own[(self.own < vocabulary).all(1)]  # a target may have padding ids that its draft lacks
        new = Windows(torch.cat([Windows(self.given, length).tokens, own.flatten()]), length)
        return Mixture(new, Windows(self.replay, length), share) if len(self.replay) else Mixture(new)


class OwnText:
    """The writing of a target's own text. Call `step` until `over`, and `save` at any time."""

    unit = "text"

    def __init__(self, target: PreTrainedModel, text: TrainingText, plan: Plan, own_tokens: int) -> None:
        """`text` receives the written tokens."""
        self.tokens = own_tokens
        self._text = text
        self._written = plan.length - PROMPT_TOKENS  # tokens of a text
        self.total = -(-own_tokens // self._written)  # texts
        prompts = Windows(text.given, plan.length).trained.flatten()  # excludes held-out windows
        self._parts = continuations(target, prompts, plan.length, self.total, plan.seed, begin=self.done)

    @property
    def done(self) -> int:
        return len(self._text.own)

    @property
    def over(self) -> bool:
        return self.done >= self.total

    def step(self) -> float:
        """Write the next texts; return the number of tokens written so far."""
        self._text.own = torch.cat([self._text.own, next(self._parts)])
        return float(self.done * self._written)

    def describe(self, tokens: float) -> str:
        return f"{tokens:.0f} tokens written"

    def save(self, out: Path) -> None:
        self._text.save(out)
