"""Compare decoding without a draft model, by n-gram lookup and lookahead windows, with plain decoding.

    python -m bench lookahead --prompts 8 --tokens 128

One verifier on all cores, one stream. All configurations take turns prompt by prompt; a ratio is the median over
prompts of the ratio within one. "plain" is the same service without speculation, "auto" chooses its window by what it
brings, and windows of the sizes (W, N, G) are in every step, whether or not they pay. The tokens of all configurations
are compared with plain's.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from demo.prompts import held_out
from specdec.client import Client
from specdec.local import DEMO, Stack

SIZES = ((2, 2, 1), (8, 2, 1), (3, 3, 3), (5, 3, 5), (7, 4, 7), (7, 5, 7), (10, 5, 10), (15, 5, 15))


@dataclass
class Arm:
    """A configuration of requests, and its rates."""

    name: str
    options: dict[str, Any]
    rates: list[float] = field(default_factory=list)  # tokens a second
    tokens: list[list[int]] = field(default_factory=list)
    steps: int = 0
    sources: Counter[str] = field(default_factory=Counter)

    def query(self, client: Client, prompt: list[int], **options: Any) -> None:
        start = time.perf_counter()
        result = client.complete(tokens=prompt, ignore_end_token=True, **self.options, **options)
        sample = result.completions[0]
        self.rates.append(len(sample.tokens) / (time.perf_counter() - start))
        self.tokens.append(list(sample.tokens))
        self.steps += sample.finish.speculation.steps
        self.sources.update(sample.finish.speculation.sources)


def main(given: Sequence[str]) -> None:
    parser = parser_of("lookahead", __doc__)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    args = parser.parse_args(given)

    arms = [Arm("plain", {"speculation": "off"}), Arm("auto", {"speculation": "lookahead"})]
    arms += [Arm(str(size), {"speculation": "lookahead", "lookahead": size}) for size in SIZES]
    options = {"max_tokens": args.tokens, "temperature": args.temperature, "seed": 1}
    with Stack.start(args.target, "none", dtype=args.dtype) as stack, Client(stack.address) as client:
        for number, prompt in enumerate(held_out(args.prompts + 1, args.prompt_tokens)):
            for arm in arms:
                arm.query(client, prompt, **options)
                if not number:  # warm now
                    arm.rates, arm.tokens, arm.steps, arm.sources = [], [], 0, Counter()

    plain = arms[0]
    print(f"{'':14} tokens/s  over plain            tokens a step  copied  looked ahead  texts that differ")
    for arm in arms:
        ratios = sorted(mine / theirs for mine, theirs in zip(arm.rates, plain.rates, strict=True))
        count = sum(map(len, arm.tokens))
        different = sum(mine != theirs for mine, theirs in zip(arm.tokens, plain.tokens, strict=True))
        print(
            f"{arm.name:14} {statistics.median(arm.rates):8.0f}  "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})   {count / arm.steps:13.2f}"
            f"  {arm.sources['ngram'] / count:6.2f}  {arm.sources['lookahead'] / count:12.2f}  {different:17}"
        )
