"""The demo, `make demo`: one completion, drafted and then plain, by three real services.

Both give the same tokens; the drafted run takes fewer steps of the target. Each way runs twice, and its faster run
counts, since another program may disturb one of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import get_args

from rich.console import Console
from rich.text import Text

from specdec.cli.shown import STYLES, coloured
from specdec.client import Client, SpecdecError
from specdec.engine.placement import WantedDtype
from specdec.local import LocalError, Stack

PROMPT = '''import os
import sys


class ConfigParser:
    """Read a configuration file and return its sections."""

    def __init__(self, filename, encoding="utf-8"):
'''


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    seconds: float
    steps: int

    @property
    def rate(self) -> float:
        return len(self.tokens) / self.seconds


def run(client: Client, console: Console, prompt: str, *, speculation: str, show: bool, **options: float) -> Run:
    """Run one completion; with `show`, print it as it comes."""
    tokens: list[int] = []
    elapsed = 0.0
    steps = 0
    if show:
        console.print(Text(prompt, style="dim"), end="")
    with client.generate(prompt, speculation=speculation, ignore_end_token=True, **options) as stream:  # type: ignore[arg-type]
        for chunk in stream:
            tokens += chunk.tokens
            elapsed = chunk.elapsed_seconds
            if chunk.finish is not None:
                steps = chunk.finish.speculation.steps
            if show:
                console.file.write(coloured(chunk, console))
                console.file.flush()
    if show:
        console.print("\n")
    return Run(tokens, elapsed, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--dtype", choices=get_args(WantedDtype), default="auto")
    args = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    console.print("[bold]Starting verifier, draft and orchestrator...[/bold]")
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    try:
        with Stack.start(dtype=args.dtype) as stack, Client(stack.address) as client:
            # Warm up with a short request: loading on first use is not to be timed.
            run(client, console, args.prompt, speculation="auto", show=False, max_tokens=16)
            legend = Text.assemble(*((f" {name} ", style) for name, style in STYLES.items()))
            console.print(Text("Colours show the source of each token:"), legend, "\n")
            drafted = run(client, console, args.prompt, speculation="auto", show=True, **options)
            console.print("[bold]The same, with drafting off:[/bold]\n")
            plain = run(client, console, args.prompt, speculation="off", show=True, **options)
            runs = {"drafted": [drafted], "plain": [plain]}
            for name, speculation in (("plain", "off"), ("drafted", "auto")):
                runs[name].append(run(client, console, args.prompt, speculation=speculation, show=False, **options))
    except (LocalError, SpecdecError) as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    fastest = {name: max(made, key=lambda result: result.rate) for name, made in runs.items()}
    for name, result in fastest.items():
        console.print(
            f"{name:8} {result.rate:6.0f} tokens/s   {len(result.tokens)} tokens in {result.steps} steps, "
            f"{result.seconds:.2f} s"
        )
    if any(result.tokens != plain.tokens for made in runs.values() for result in made):
        sys.exit("The tokens differ: this is a bug.")
    ratio = fastest["drafted"].rate / fastest["plain"].rate
    console.print(f"The same tokens, [bold]{ratio:.2f} times[/bold] as fast (the faster of two runs each).")


if __name__ == "__main__":
    main()
