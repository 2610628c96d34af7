"""transformers' own `generate` as a peer, one prompt after the other: plain, assisted, or with prompt lookup.

python -m bench.peers.transformers_generate --model DIR --draft DIR --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from bench.peers.protocol import Generate, Record, Request, serve

PLAIN, ASSISTED, LOOKUP = "plain", "assisted", "prompt lookup"
"""Ways to ask; assisted may be followed by a number of tokens to draft for every step."""

LOOKED_UP = 10
"""Tokens that prompt lookup copies at most, as transformers' documentation has it."""


def start(args: argparse.Namespace) -> tuple[dict[str, Any], Generate]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(os.cpu_count() or 1)
    load, kind = AutoModelForCausalLM.from_pretrained, getattr(torch, args.dtype)
    target = load(args.model, dtype=kind).eval()
    draft = load(args.draft, dtype=kind).eval() if args.draft is not None else None
    schedule = None if draft is None else draft.generation_config
    own = {} if schedule is None else {name: getattr(schedule, name) for name in _always(0)}
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    target.register_forward_pre_hook(count)

    class Times(BaseStreamer):  # type: ignore[misc]
        """First the prompt, then whatever a step has brought."""

        def __init__(self, record: Record, prompt: int) -> None:
            self._record, self._prompt, self._begun = record, prompt, False

        def put(self, value: Any) -> None:
            if self._begun:
                self._record.add(self._prompt, value.numel())
            self._begun = True

        def end(self) -> None:
            pass

    def generate(request: Request, record: Record) -> None:
        nonlocal steps
        steps = 0
        options: dict[str, Any] = {"min_new_tokens": request.max_tokens, "max_new_tokens": request.max_tokens}
        options |= {"pad_token_id": 0, "do_sample": request.temperature > 0}
        if request.temperature > 0:
            options |= {"temperature": request.temperature, "top_k": None}
        way, _, drafted = request.how.partition(" of ")
        if way == ASSISTED:
            assert schedule is not None
            schedule.update(**(_always(int(drafted)) if drafted else own))
            options["assistant_model"] = draft
        elif way == LOOKUP:
            options["prompt_lookup_num_tokens"] = LOOKED_UP
        elif way != PLAIN:
            raise ValueError(f"{way}: no way to ask generate")
        for number, prompt in enumerate(request.prompts):
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                target.generate(ids, attention_mask=torch.ones_like(ids), streamer=Times(record, number), **options)
        record.steps = steps

    hello = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "flags": {"threads": torch.get_num_threads(), "draft": args.draft and args.draft.name, "looked_up": LOOKED_UP},
    }
    return hello, generate


def _always(tokens: int) -> dict[str, Any]:
    """So many for each step, however sure the assistant is."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    serve(lambda _: start(args))


if __name__ == "__main__":
    main()
