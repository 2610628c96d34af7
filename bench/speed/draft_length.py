"""Measure run time by number of tokens drafted, for specdec and transformers.

    python -m bench draft-length --out build/draft-length
    python -m bench draft-length --target DIR --draft DIR --temperature 0.8

For each number N, specdec verifies a chain of up to N tokens, whether or not that pays; transformers' assisted
generation drafts N tokens in every step (a constant schedule, no confidence threshold). All take turns prompt by
prompt. The report has medians over prompts: the time for a text, and its ratio to the same system's plain decoding of
the same prompt. The prompts are tokens of the demo's vocabulary, which the models must share. At temperature 0, drafted
texts are compared with plain ones; specdec's plain ones are decoded again with exact numerics. Writes draft-length.json
and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import track

from bench import markdown
from bench.arguments import limit, parser_of
from bench.conditions import machine, model_name, versions
from bench.report import folder, publish
from bench.systems import pair
from bench.systems.transformers_generate import Transformers, assisted
from demo.prompts import held_out
from specdec.client import Client, SpecdecError
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO, LocalError, Stack

SYSTEMS = ("specdec", "transformers")
EXACT = "specdec, exact"
REFERENCES = {"specdec": EXACT, "transformers": "transformers"}
"""For each system, the configuration whose plain texts are compared with the drafted ones. specdec's timed plain
decoding has fast numerics, so its texts may differ."""
PLAIN = 0
"""Number of tokens drafted in plain decoding."""

Generate = Callable[[list[int]], list[int]]


def configurations(args: argparse.Namespace, exits: contextlib.ExitStack) -> dict[tuple[str, int], Generate]:
    """Return the configurations by system and number of tokens drafted."""

    def served(draft: str, *options: str) -> Client:
        stack = Stack.start(args.target, draft, dtype=args.dtype, verifier_options=options)
        return exits.enter_context(Client(exits.enter_context(stack).address))

    def text_of(client: Client, **options: Any) -> Generate:
        options |= {
            "max_tokens": args.tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "ignore_end_token": True,
        }
        return lambda prompt: (
            client.complete(tokens=prompt, cache_salt=uuid.uuid4().hex, **options).completions[0].tokens
        )

    fast, drafted = served("none", "--no-exact"), served(str(args.draft))
    theirs = partial(
        Transformers(args.target, args.draft, args.dtype), tokens=args.tokens, temperature=args.temperature
    )

    found: dict[tuple[str, int], Generate] = {
        ("specdec", PLAIN): text_of(fast, speculation="off"),
        (EXACT, PLAIN): text_of(drafted, speculation="off"),
        ("transformers", PLAIN): theirs,
    }
    for count in range(1, args.most + 1):
        chain = {"max_candidates": count, "max_depth": count, "max_branches": 1}
        found["specdec", count] = text_of(drafted, speculation="always", **chain)
        found["transformers", count] = partial(theirs, mode=assisted(count))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each text, by system and number of tokens drafted; return the report."""
    seconds: dict[tuple[str, int], list[float]] = {}
    different = dict.fromkeys(SYSTEMS, 0)
    with contextlib.ExitStack() as exits:
        asked = configurations(args, exits)
        prompts, bar = held_out(args.prompts + 1), Console(stderr=True)
        for number, prompt in enumerate(track(prompts, "prompts", console=bar, disable=not bar.is_terminal)):
            texts = {}
            for configuration, generate in asked.items():
                begin = time.perf_counter()
                texts[configuration] = generate(prompt)
                if number:  # the first prompt warms up
                    seconds.setdefault(configuration, []).append(time.perf_counter() - begin)
            for system, reference in REFERENCES.items():
                drafted = (texts[system, count] for count in range(1, args.most + 1))
                different[system] += sum(text != texts[reference, PLAIN] for text in drafted)
    return {
        "seconds": {system: {count: seconds[system, count] for count in range(args.most + 1)} for system in SYSTEMS},
        "texts_that_differ": different if args.temperature == 0 else None,
    }


def ratios(report: dict[str, Any], system: str, count: int) -> list[float]:
    """Return ratios of run time to the same system's plain decoding, by prompt."""
    mine = report["seconds"][system]
    return [a / b for a, b in zip(mine[count], mine[PLAIN], strict=True)]


def table(report: dict[str, Any]) -> str:
    counts = sorted(report["seconds"][SYSTEMS[0]])
    lines = [
        f"Target: {report['target']}. Draft: {report['draft']}. {report['dtype']}, T = {report['temperature']:g}, "
        f"{report['prompts']} prompts continued by {report['tokens']} tokens. Seconds a text (of plain decoding's).",
        "",
        markdown.head(["tokens drafted", *("plain" if count == PLAIN else count for count in counts)]),
    ]
    for system in SYSTEMS:
        cells = (
            f"{statistics.median(report['seconds'][system][count]):.2f} "
            f"({statistics.median(ratios(report, system, count)):.2f})"
            for count in counts
        )
        lines.append(markdown.row([system, *cells]))
    if report["texts_that_differ"] is not None:
        told = ", ".join(f"{system} {count}" for system, count in report["texts_that_differ"].items())
        lines += ["", f"Texts that differ from the same system's plain decoding: {told}."]
    return "\n".join(lines) + "\n"


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("draft-length", __doc__)
    pair.add(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)g")
    parser.add_argument("--most", type=int, default=10, help="maximum tokens drafted (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="at most 2 tokens drafted, 2 prompts, texts of 32 tokens")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.most, args.prompts, args.tokens = min(args.most, 2), 2, 32
    limit(parser, args, 1, "most", "prompts", "tokens")
    args.target, args.draft = pair.both(parser, args)
    prompts_are_of = ModelDirectory(DEMO / "target").tokenizer_fingerprint
    for name in ("target", "draft"):
        if ModelDirectory(getattr(args, name)).tokenizer_fingerprint != prompts_are_of:
            parser.error(f"--{name} {getattr(args, name)}: must have the demo's tokenizer: the prompts are its tokens")
    return args


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    try:
        measured = measure(args)
    except (LocalError, SpecdecError) as error:
        sys.exit(f"bench draft-length: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    facts = {"target": model_name(args.target), "draft": model_name(args.draft)}
    asked = {name: getattr(args, name) for name in ("dtype", "temperature", "prompts", "tokens", "seed")}
    report = facts | asked | measured | {"machine": machine(), "versions": versions()}
    publish(report, args.out, "draft-length", table)
