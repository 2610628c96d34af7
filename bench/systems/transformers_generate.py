"""transformers' own `generate` as a system under test, one prompt after the other: plain, assisted by a draft with its
own schedule or with a fixed length, or with prompt lookup.

    python -m bench.systems.transformers_generate --model DIR --draft DIR --dtype bfloat16

is the program that answers loads. Without a draft there is no assisted generation.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.systems.program import Program
from bench.systems.protocol import Generate, Record, Request, serve
from bench.systems.system import Configuration, Launch, Setup

PLAIN, ASSISTED, LOOKUP = "plain", "assisted", "prompt lookup"
"""Modes of `generate`."""

LOOKED_UP = 10
"""Maximum tokens copied by prompt lookup, as in transformers' documentation."""


def assisted(tokens: int) -> str:
    """Return the mode that drafts `tokens` tokens for each step, whatever the assistant's confidence.

    ASSISTED leaves the number to transformers, by default a schedule and a confidence threshold.
    """
    return f"{ASSISTED} of {tokens}"


MODES = {
    "transformers generate": PLAIN,
    "transformers assisted": ASSISTED,
    "transformers assisted, 5": assisted(5),
    "transformers prompt lookup": LOOKUP,
}
"""Measured modes, by the name of the configuration."""


def launches(setup: Setup) -> list[Launch]:
    options = ["--model", str(setup.target.resolve()), "--dtype", setup.dtype]
    modes = MODES
    if setup.draft is None:
        modes = {name: mode for name, mode in MODES.items() if not mode.startswith(ASSISTED)}
    else:
        options += ["--draft", str(setup.draft.resolve())]
    start = partial(Program.start, "generate", sys.executable, "bench.systems.transformers_generate", options)
    configurations = (Configuration(name, mode, one_stream=True) for name, mode in modes.items())
    return [Launch("transformers generate", start, tuple(configurations))]


class Transformers:
    """transformers' `generate` in this process, on all cores. `steps` counts the target's forward passes."""

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
        self, prompt: list[int], *, tokens: int, temperature: float = 0.0, mode: str = PLAIN, streamer: Any = None
    ) -> list[int]:
        """Return `tokens` more tokens, generated in this mode; a `streamer` (BaseStreamer) gets them as they come."""
        options: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        options |= {"do_sample": temperature > 0} | ({"temperature": temperature, "top_k": None} if temperature else {})
        kind, _, drafted = mode.partition(" of ")
        if kind == ASSISTED:
            if self._draft is None:
                raise ValueError(f"{mode}: there is no draft")
            self._draft.generation_config.update(**(_always(int(drafted)) if drafted else self._own_schedule))
            options["assistant_model"] = self._draft
        elif kind == LOOKUP:
            options["prompt_lookup_num_tokens"] = LOOKED_UP
        elif kind != PLAIN:
            raise ValueError(f"{mode}: generate has no such mode")
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


def start(args: argparse.Namespace) -> tuple[dict[str, Any], Generate]:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    model = Transformers(args.model, args.draft, args.dtype)

    class Times(BaseStreamer):  # type: ignore[misc]
        """A streamer that records times. It receives the prompt first, then the tokens of each step."""

        def __init__(self, record: Record, prompt: int) -> None:
            self._record, self._prompt, self._begun = record, prompt, False

        def put(self, value: Any) -> None:
            if self._begun:
                self._record.add(self._prompt, value.numel())
            self._begun = True

        def end(self) -> None:
            """Do nothing: there is nothing to flush."""

    def generate(request: Request, record: Record) -> None:
        before = model.steps
        for number, prompt in enumerate(request.prompts):
            model(
                prompt,
                tokens=request.max_tokens,
                temperature=request.temperature,
                mode=request.mode,
                streamer=Times(record, number),
            )
        record.steps = model.steps - before

    flags = {"threads": torch.get_num_threads(), "draft": args.draft and args.draft.name, "looked_up": LOOKED_UP}
    return {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "flags": flags,
    }, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    serve(lambda _: start(args))


if __name__ == "__main__":
    main()
