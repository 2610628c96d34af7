"""transformers' `generate`, in this process on all cores: plain, assisted by a draft, or with prompt lookup."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PLAIN, ASSISTED, LOOKUP = "plain", "assisted", "prompt lookup"
"""Modes of `generate`."""

LOOKED_UP = 10
"""Most tokens that prompt lookup copies, as in transformers' documentation."""


def assisted(tokens: int) -> str:
    """Return the mode that drafts `tokens` tokens for each step, however sure the assistant is.

    ASSISTED drafts as many as transformers decides, by default with a schedule and a confidence threshold."""
    return f"{ASSISTED} of {tokens}"


class Transformers:
    """transformers' `generate` on one prompt at a time. `steps` counts the target's forward passes."""

    def __init__(self, target: Path, draft: Path | None, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
        load, kind = AutoModelForCausalLM.from_pretrained, getattr(torch, dtype)
        self._target = load(target, dtype=kind).eval()
        self._target.register_forward_pre_hook(self._count)
        self._draft = None if draft is None else load(draft, dtype=kind).eval()
        config = None if self._draft is None else self._draft.generation_config
        self._own_schedule = {name: getattr(config, name) for name in _always(0)} if config else {}
        self.steps = 0

    def __call__(
        self, prompt: list[int], *, tokens: int, temperature: float = 0.0, how: str = PLAIN, streamer: Any = None
    ) -> list[int]:
        """Return `tokens` more tokens, generated in mode `how`; a `streamer` (BaseStreamer) gets them as they come."""
        options: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        options |= {"do_sample": temperature > 0} | ({"temperature": temperature, "top_k": None} if temperature else {})
        way, _, drafted = how.partition(" of ")
        if way == ASSISTED:
            if self._draft is None:
                raise ValueError(f"{how}: there is no draft")
            self._draft.generation_config.update(**(_always(int(drafted)) if drafted else self._own_schedule))
            options["assistant_model"] = self._draft
        elif way == LOOKUP:
            options["prompt_lookup_num_tokens"] = LOOKED_UP
        elif way != PLAIN:
            raise ValueError(f"{how}: no way to ask generate")
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            output = self._target.generate(ids, attention_mask=self._torch.ones_like(ids), streamer=streamer, **options)
        return list(output[0, len(prompt) :].tolist())

    def _count(self, *_: Any) -> None:
        self.steps += 1


def _always(tokens: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
