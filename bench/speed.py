"""Tokens a second on the demo pair: with a draft and without one against plain decoding at its own best, and against
transformers' `generate`, plain and assisted.

    python -m bench.speed --dtype bfloat16 --prompts 8 --tokens 128

The arms take turns prompt by prompt, so that a machine that slows down slows all of them; a ratio is
the median over prompts of the ratio within one prompt. "Plain at its own best" is the service without
a draft, asked for no speculation: fast numerics, speculative code bypassed, all cores. "Undrafted" is the same
service asked for what it guesses by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.generate import Transformers
from bench.prompts import held_out
from specdec.client import Client, Finish
from specdec.local import DEMO, Stack

Arm = Callable[[list[int]], list[int]]


@dataclass
class Served:
    """An arm that is a running stack; remembers what its responses told."""

    client: Client
    options: dict[str, Any]
    outside_forward: list[float] = field(default_factory=list)  # seconds of a step that are not the forward
    between_steps: list[float] = field(default_factory=list)  # seconds of a round that are not the step
    finishes: list[Finish] = field(default_factory=list)

    def __call__(self, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        last: float | None = None
        with self.client.generate(tokens=prompt, ignore_end_token=True, **self.options) as stream:
            for chunk in stream:
                tokens += chunk.tokens
                if last is not None:  # the first round holds the prompt
                    self.outside_forward.append(chunk.step_seconds - chunk.forward_seconds)
                    self.between_steps.append(chunk.elapsed_seconds - last - chunk.step_seconds)
                last = chunk.elapsed_seconds
                if chunk.finish is not None:
                    self.finishes.append(chunk.finish)
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object")
    args = parser.parse_args()

    options = {"max_tokens": args.tokens, "temperature": args.temperature, "seed": 1}
    prompts = held_out(args.prompts + 1)
    with contextlib.ExitStack() as exits:

        def served(**stack: Any) -> Client:
            return exits.enter_context(Client(exits.enter_context(Stack.start(dtype=args.dtype, **stack)).address))

        alone = served(draft="none", verifier_options=("--no-exact",))
        plain = Served(alone, {**options, "speculation": "off"})
        drafted = Served(served(), options)
        arms: dict[str, Arm] = {
            "plain at its best": plain,
            "undrafted": Served(alone, options),
            "drafted": drafted,
        }
        if not args.no_transformers:
            asked: dict[str, Any] = {"dtype": args.dtype, "tokens": args.tokens, "temperature": args.temperature}
            arms["transformers plain"] = Transformers(DEMO / "target", None, **asked)
            arms["transformers assisted"] = Transformers(DEMO / "target", DEMO / "draft", **asked)

        rates: dict[str, list[float]] = {name: [] for name in arms}
        texts: dict[str, list[list[int]]] = {name: [] for name in arms}
        for number, prompt in enumerate(prompts):
            for name, arm in arms.items():
                start = time.monotonic()
                tokens = arm(prompt)
                seconds = time.monotonic() - start
                if number:  # the first prompt warms up
                    rates[name].append(len(tokens) / seconds)
                    texts[name].append(tokens)

    finishes = drafted.finishes[1:]
    steps = sum(f.speculation.steps for f in finishes)
    accepted = sum(f.speculation.accepted for f in finishes)
    figures = {
        "dtype": args.dtype,
        "temperature": args.temperature,
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "over_plain_at_its_best": {
            name: statistics.median(a / b for a, b in zip(values, rates["plain at its best"], strict=True))
            for name, values in rates.items()
        },
        "mean_tokens_per_step": (accepted + steps) / steps,
        "candidates_per_step": sum(f.speculation.drafted for f in finishes) / steps,
        "step_outside_forward_ms": 1e3 * statistics.median(drafted.outside_forward),
        "round_outside_step_ms": 1e3 * statistics.median(drafted.between_steps),
        "plain_step_outside_forward_ms": 1e3 * statistics.median(plain.outside_forward),
        "plain_round_outside_step_ms": 1e3 * statistics.median(plain.between_steps),
        "prompts_with_equal_tokens": sum(
            a == b for a, b in zip(texts["drafted"], texts["plain at its best"], strict=True)
        ),
        "prompts": args.prompts,
    }
    if args.json:
        print(json.dumps(figures))
        return
    for name, rate in figures["tokens_per_second"].items():
        print(f"{name:24} {rate:7.0f} tokens/s   {figures['over_plain_at_its_best'][name]:5.2f} x plain at its best")
    for name, value in figures.items():
        if not isinstance(value, dict):
            print(f"{name:32} {value if isinstance(value, str | int) else round(value, 3)}")


if __name__ == "__main__":
    main()
