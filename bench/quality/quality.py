"""Compare the diversity of texts from naive sampling, speculative sampling and contrastive decoding, by n-gram entropy
(n = 1 to 3) and distinct-n (n = 1, 2): does speculation change the distribution of texts?

    python -m bench quality --out build/quality
    python -m bench quality --target DIR --draft DIR --prompt "Once upon a time" --texts 50

Speculative sampling uses the REJECTION rule with forced drafting. It draws other tokens than naive sampling, but from
the same distribution, so its texts must be equally diverse, within noise. (Under the COUPLED rule the tokens would be
identical.) Contrastive decoding is deterministic: one text per prompt, without standard errors. Each measure is
computed within a text and averaged over texts, so it depends on the length of texts. Writes quality.json and
quality.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.arguments import limit, parser_of
from bench.conditions import machine, model_name, versions
from bench.quality.report import Text, measured, reported, table
from bench.report import folder, publish
from specdec.client import Client, GenerateOptions, SpecdecError
from specdec.local import DEMO, LocalError, Stack

PROMPTS = (
    "Large Language models are",
    "Barack Obama was",
    "Decoding strategy is important because",
    "A good recipe for Halloween is",
    "Stanford is known for",
)
AT_ONCE = 8
"""Samples per request."""


def methods(temperature: float, alpha: float) -> dict[str, GenerateOptions]:
    return {
        "naive": {"speculation": "off", "temperature": temperature},
        "speculative": {"speculation": "always", "temperature": temperature, "rule": "rejection"},
        "contrastive": {"rule": "contrastive", "alpha": alpha},
    }


def query(
    client: Client, prompts: Sequence[str], options: GenerateOptions, texts: int, tokens: int, seed: int, progress: str
) -> list[Text]:
    """Return `texts` samples of each prompt; one if decoding is deterministic."""
    found = []
    several = bool(options.get("temperature"))
    rounds = [(number, begin) for number in range(len(prompts)) for begin in range(0, texts if several else 1, AT_ONCE)]
    bar = Console(stderr=True)
    for number, begin in track(rounds, progress, console=bar, transient=True, disable=not bar.is_terminal):
        count = min(AT_ONCE, texts - begin) if several else 1
        asked: GenerateOptions = {**options, "n": count, "seed": seed + begin, "max_tokens": tokens}
        result = client.complete(prompts[number], **asked)
        found += [measured(number, completion) for completion in result.completions]
    return found


@contextlib.contextmanager
def client_of(args: argparse.Namespace) -> Iterator[Client]:
    if args.address:
        with Client(args.address) as client:
            yield client
        return
    with Stack.start(args.target, args.draft, dtype=args.dtype) as stack, Client(stack.address) as client:
        yield client


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("quality", __doc__)
    parser.add_argument("--address", help="address of a running orchestrator with a draft; default: start one")
    parser.add_argument("--target", type=Path, help="target directory; default: the demo's")
    parser.add_argument("--draft", help="draft directory; default: the demo's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16")
    parser.add_argument("--prompt", action="append", help="may be repeated; default: five classic prompts")
    parser.add_argument("--texts", type=int, default=40, help="texts per prompt and method (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="maximum tokens of a text (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--alpha", type=float, default=0.1, help="alpha of contrastive decoding (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 texts of 64 tokens")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.texts, args.tokens = 8, 64
    limit(parser, args, 1, "texts", "tokens")
    if args.temperature <= 0:
        parser.error(f"--temperature is {args.temperature:g}: sampling needs one above 0")
    for name in ("target", "draft", "dtype"):
        if args.address and getattr(args, name):
            parser.error(f"--{name} cannot be combined with --address, which uses a running deployment")
    if args.target and not args.draft:
        parser.error("--target needs a --draft that fits it")
    args.dtype = "that of the address" if args.address else args.dtype or "bfloat16"
    return args


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    prompts = args.prompt or list(PROMPTS)
    texts = {}
    try:
        with client_of(args) as client:
            model = client.models()[0].name
            for number, (method, options) in enumerate(methods(args.temperature, args.alpha).items()):
                seed = args.seed + number * 1_000_000  # equal seeds would correlate the methods' texts
                texts[method] = query(client, prompts, options, args.texts, args.tokens, seed, method)
    except (LocalError, SpecdecError) as error:
        sys.exit(f"bench quality: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    report = {
        "target": model if args.address else model_name(args.target or DEMO / "target"),
        "draft": "of the address" if args.address else model_name(Path(args.draft or DEMO / "draft")),
        "dtype": args.dtype,
        "temperature": args.temperature,
        "alpha": args.alpha,
        "seed": args.seed,
        "tokens": args.tokens,
        "prompts": prompts,
        **reported(texts),
        "machine": machine(),
        "versions": versions(),
    }
    publish(report, args.out, "quality", table)
