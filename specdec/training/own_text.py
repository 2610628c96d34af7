"""The tokens of a training, including text that the target writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.training.files import TEXTS, read_tensors, write_texts
from specdec.training.plan import Plan, ResumeError
from specdec.training.texts import HELD_OUT, PROMPT_TOKENS, Mixture, TextError, Windows, continuations


@dataclass
class TrainingText:
    """The tokens of a training."""

    given: Tensor  # int64 [n]
    replay: Tensor  # int64 [m], older; may be empty
    own: Tensor  # int64 [texts, length], written by the target so far, to train on
    own_held_out: Tensor  # int64 [texts, length], written by the target so far, held out
    in_memory: bool = False  # `save` writes nothing

    @classmethod
    def kept(cls, out: Path) -> TrainingText:
        """Return the tokens kept by `save`. ResumeError if an earlier version wrote them."""
        kept = read_tensors(out / TEXTS)
        if not {"tokens", "replay", "own", "own_held_out"} <= kept.keys():
            raise ResumeError(f"{out / TEXTS}: was written by an earlier version, cannot be resumed")
        return cls(kept["tokens"], kept["replay"], kept["own"], kept["own_held_out"])

    def save(self, out: Path) -> None:
        if not self.in_memory:
            write_texts(out, self.given, replay=self.replay, own=self.own, own_held_out=self.own_held_out)

    def check(self, length: int, vocabulary: int, model: str, option: str = "--text") -> None:
        """Raise TextError unless the given text, which an `option` names, and the replay text if any, each fill two
        windows of `length` tokens, and all tokens are below `vocabulary`, the width of the `model`'s logits."""
        for name, tokens in ((option, self.given), ("--replay", self.replay)):
            if not len(tokens) and name == "--replay":
                continue
            if len(tokens) < 2 * length:
                raise TextError(f"{name}: has {len(tokens)} tokens, must have at least {2 * length}: two windows")
            if (highest := int(tokens.max())) >= vocabulary:
                raise TextError(f"{name}: has the token {highest}, but the {model}'s vocabulary has {vocabulary} ids")

    def windows(self, length: int, vocabulary: int) -> Windows:
        """Return the windows of the given text and of the own texts whose tokens are all below `vocabulary`."""
        # A target may have padding ids that its draft lacks.
        own, held_out = (texts[(texts < vocabulary).all(1)] for texts in (self.own, self.own_held_out))
        return Windows(self.given, length).joined(own, held_out)

    def mixture(self, length: int, vocabulary: int, share: float) -> Mixture:
        """Return the windows to train a draft on, a `share` of them from `replay`."""
        new = self.windows(length, vocabulary)
        return Mixture(new, Windows(self.replay, length), share) if len(self.replay) else Mixture(new)


class OwnText:
    """The writing of a target's own text. Call `step` until `over`, and `save` at any time."""

    unit = "text"

    def __init__(self, target: PreTrainedModel, text: TrainingText, plan: Plan, own_tokens: int) -> None:
        """`text` receives the written tokens. One text in HELD_OUT is held out, and continues a held-out window: it
        shares no prompt with a text to train on."""
        self.tokens = own_tokens
        self._text = text
        self._written = plan.length - PROMPT_TOKENS  # tokens of a text
        self.total = -(-own_tokens // self._written)  # texts
        windows, held_out = Windows(text.given, plan.length), self.total // HELD_OUT

        def parts(prompts: Tensor, rows: int, done: Tensor) -> Iterator[Tensor]:
            return continuations(target, prompts.flatten(), plan.length, rows, plan.seed, begin=len(done))

        self._parts = parts(windows.trained, self.total - held_out, text.own)
        self._held_out_parts = parts(windows.held_out, held_out, text.own_held_out)

    @property
    def done(self) -> int:
        return len(self._text.own) + len(self._text.own_held_out)

    @property
    def over(self) -> bool:
        return self.done >= self.total

    def step(self) -> float:
        """Write the next texts; return the number of tokens written so far."""
        if (part := next(self._parts, None)) is not None:
            self._text.own = torch.cat([self._text.own, part])
        else:
            self._text.own_held_out = torch.cat([self._text.own_held_out, next(self._held_out_parts)])
        return float(self.done * self._written)

    def describe(self, tokens: float) -> str:
        return f"{tokens:.0f} tokens written"

    def save(self, out: Path) -> None:
        self._text.save(out)
