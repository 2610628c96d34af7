"""transformers' own `generate`, plain or assisted, in this process on all cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Transformers:
    """Continues one prompt at a time by `tokens` tokens. With a `draft` it is assisted generation, of as many tokens as
    transformers finds right: its default is a schedule and a threshold of confidence."""

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        *,
        dtype: str,
        tokens: int,
        temperature: float,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
        load = AutoModelForCausalLM.from_pretrained
        kind = getattr(torch, dtype)
        self._target = load(target, dtype=kind).eval()
        self._assistant = None if draft is None else load(draft, dtype=kind).eval()
        self._options: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        if temperature > 0:
            self._options |= {"do_sample": True, "temperature": temperature, "top_k": None}
        else:
            self._options |= {"do_sample": False}

    def draft_always(self, tokens: int) -> None:
        """So many for each step from now on, however sure the assistant is."""
        assert self._assistant is not None
        config = self._assistant.generation_config
        config.num_assistant_tokens = tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0

    def __call__(self, prompt: list[int]) -> list[int]:
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            output = self._target.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                assistant_model=self._assistant,
                **self._options,
            )
        return list(output[0, len(prompt) :].tolist())
