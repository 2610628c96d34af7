"""The oracle: token equality, except for ties within the accuracy of float32.

Two runs of one request must give the same tokens. In float32, a step with another number of rows than a plain step
changes the last bits of logits; a difference is excused, counted and printed if and only if the two best scores at
its first position, noise included, differ by less than MARGIN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers

from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from tests.choices import scores

MARGIN = 1e-4


@dataclass
class Oracle:
    """Compares runs on one target; collects the excused ties."""

    target: Path
    compared: int = 0
    ties: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self.target, dtype=torch.float32, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def logits(self, text: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Return logits, float32 [V], after `text`, by the model's own forward pass."""
        result = self._model(torch.tensor([text]), use_cache=False).logits[0, -1]
        return np.asarray(result.float().numpy())

    def greedy(self, prompt: list[int], count: int, end_tokens: frozenset[int] = frozenset()) -> list[int]:
        """Return transformers' own greedy `generate`."""
        tokens = torch.tensor([prompt])
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=sorted(end_tokens) or None,
            pad_token_id=0,
        )
        return list(output[0, len(prompt) :].tolist())

    def same(self, prompt: list[int], want: list[int], got: list[int], sampler: RequestSampler, what: str = "") -> None:
        """Raise AssertionError unless the runs are equal or diverge at a tie."""
        self.compared += len(want)
        if want == got:
            return
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
        assert at < len(want), f"{what}: {len(got)} tokens, {len(want)} expected, the same as far as they go"
        assert at < len(got), f"{what}: {len(got)} tokens, {len(want)} expected, the same as far as they go"
        text = prompt + want[:at]
        logits = self.logits(text)
        history = PenaltyState(len(logits), prompt, want[:at]) if sampler.sampling.penalises else None
        _, values = scores(logits, SamplingQuery(sampler, len(text), history))
        second, first = np.sort(values)[-2:]
        margin = float(first - second)
        message = f"{what}: token {at} is {got[at]}, {want[at]} expected; margin {margin:.2e}"
        assert margin < MARGIN, message
        self.ties.append(message)
        print("tie:", message)
