"""The configuration of the speed benchmark, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arguments import limit, names, numbers, parser_of, whole_numbers
from bench.question_sets import PromptsError
from bench.report import folder
from bench.speed.prompts import DemoPrompts, Prompts, QuestionPrompts, sets_of
from bench.systems import pair, peer_options
from bench.systems.llama_cpp import LlamaFiles
from bench.systems.specdec import PLAIN, Window
from bench.systems.system import Setup
from demo.prompts import KINDS
from specdec.engine.cpu_count import cores_given
from specdec.engine.placement import BITS, Dtype, Placement, Weights
from specdec.engine.preflight.device import check_device
from specdec.engine.unsupported import UnsupportedModelError


@dataclass(frozen=True)
class SpeedConfig:
    target: Path
    draft: Path | None
    dtype: Dtype
    device: str  # of the target
    weights: Weights  # of the target, at specdec
    prompts: Prompts
    streams: Sequence[int]  # concurrent
    temperatures: Sequence[float]
    prompt_tokens: int  # maximum
    tokens: int  # generated per prompt
    rounds: int  # after one warm-up round
    learning_seconds: float  # of additional warm-up loads, for adaptive configurations
    patience_seconds: float  # maximum wait for a quiet machine each time
    seed: int  # of the prompts
    windows: Sequence[Window]
    heads: Sequence[Path]
    bad_drafts: bool
    transformers: bool
    vllm_python: str | None
    llama: LlamaFiles | None
    only: Sequence[str]
    apart: bool  # systems are loaded one at a time
    over: str  # the baseline configuration
    threads: int | None  # of the target; None: one per core
    out: Path | None

    @property
    def setup(self) -> Setup:
        return Setup(
            self.target,
            self.draft,
            self.dtype,
            max(self.streams),
            self.prompt_tokens + self.tokens,
            self.device,
            self.threads,
            self.weights,
        )

    @property
    def asked(self) -> dict[str, Any]:
        """The settings in a report, by name."""
        numerics, run = ("dtype", "device", "weights", "threads"), ("rounds", "learning_seconds", "seed", "apart")
        told = (*numerics, *run, "tokens", "streams", "temperatures", "over")
        settings = {name: getattr(self, name) for name in told}
        return settings | {"kinds": self.prompts.kinds, "prompts": self.prompts.length}


def parsed(given: Sequence[str], about: str | None = None) -> SpeedConfig:
    parser = parser_of("speed", about)
    pair.add(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument(
        "--device", default="cpu", help="device of the target: cpu, cuda or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--weights", choices=list(BITS), default="stored", help="of the target, at specdec (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="threads of targets; drafts and all else get the other cores")
    parser.add_argument("--kinds", type=names, help="of the demo's prompts; default: " + ",".join(KINDS))
    parser.add_argument(
        "--prompts", nargs="+", metavar="NAME", help="names or files as in `bench papers`, in place of the demo's kinds"
    )
    parser.add_argument("--streams", type=whole_numbers, default=[1, 4, 16], help="concurrent streams; default: 1,4,16")
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8], help="default: 0,0.8")
    parser.add_argument(
        "--prompt-tokens", type=int, default=96, help="length of the demo's prompts, maximum of others (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after a warm-up round (default: %(default)s)")
    parser.add_argument(
        "--learning", type=float, default=5.0, help="seconds of similar loads first (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to wait for a quiet machine each time")
    parser.add_argument(
        "--windows", type=_window, nargs="+", default=[], help="lookahead windows W,N,G to measure as well"
    )
    parser.add_argument("--heads", type=Path, nargs="+", default=[], help="directories of heads to measure as well")
    parser.add_argument("--bad-drafts", action="store_true", help="measure slow, random and foreign drafts as well")
    parser.add_argument("--peers", type=names, default=["transformers"], help='"transformers" (default), or "none"')
    peer_options.add(parser)
    parser.add_argument("--only", type=names, default=[""], help="only systems with one of these words in their name")
    parser.add_argument(
        "--apart", action="store_true", help="load one system at a time, if memory is too small for all"
    )
    parser.add_argument("--over", default=PLAIN, help="baseline of the ratios (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a kind, 1 and 4 streams, greedy, 1 round of 64 tokens")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.streams, args.temperatures, args.rounds, args.tokens = [1, 4], [0.0], 1, 64
        args.patience, args.learning = min(args.patience, 1.0), min(args.learning, 1.0)
    _check(parser, args)
    target, draft = pair.chosen(parser, args)
    prompts = _prompts(parser, args, target)
    if args.bad_drafts and draft is None:
        parser.error("--bad-drafts needs --draft")
    return SpeedConfig(
        target=target,
        draft=draft,
        dtype=args.dtype,
        device=args.device,
        weights=args.weights,
        prompts=prompts,
        streams=args.streams,
        temperatures=args.temperatures,
        prompt_tokens=args.prompt_tokens,
        tokens=args.tokens,
        rounds=args.rounds,
        learning_seconds=args.learning,
        patience_seconds=args.patience,
        seed=args.seed,
        windows=args.windows,
        heads=args.heads,
        bad_drafts=args.bad_drafts,
        transformers="transformers" in args.peers,
        vllm_python=peer_options.vllm_python(parser, args),
        llama=peer_options.llama_files(parser, args),
        only=args.only,
        apart=args.apart,
        over=args.over,
        threads=args.threads,
        out=args.out,
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    limit(parser, args, 32, "prompt_tokens")
    limit(parser, args, 1, "tokens", "rounds", "streams")
    limit(parser, args, 0, "learning", "patience", "temperatures")
    for path in args.heads:
        if not path.exists():
            parser.error(f"--heads {path}: there is no such file or directory")
    try:
        check_device(Placement(device=args.device))
    except UnsupportedModelError as error:
        parser.error(f"--{error}")
    if args.threads is not None:
        if not 1 <= args.threads <= cores_given():
            parser.error(f"--threads is {args.threads}, must be 1 to {cores_given()} (the available cores)")
        if args.device != "cpu":
            parser.error("--threads needs --device cpu")
        if args.peers != ["none"] or args.llama_server:
            parser.error("--threads: of the other systems only vLLM supports it: add --peers none")
    if args.device != "cpu" and (args.peers != ["none"] or args.vllm_python or args.llama_server):
        parser.error(f"--device {args.device}: other systems are measured on the CPU only: add --peers none")
    if args.weights != "stored" and args.device != "cpu":
        parser.error(f"--weights {args.weights} needs --device cpu")
    for name, known in (("kinds", list(KINDS)), ("peers", ["transformers", "none"])):
        if unknown := set(getattr(args, name) or ()) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")


def _prompts(parser: argparse.ArgumentParser, args: argparse.Namespace, target: Path) -> Prompts:
    """Return the prompts asked for; with --quick, of one kind."""
    if args.prompts is None:
        kinds = args.kinds or (["code"] if args.quick else list(KINDS))
        return DemoPrompts(kinds, args.prompt_tokens, target)
    if args.kinds:
        parser.error("--kinds and --prompts: give only one of them")
    try:
        return QuestionPrompts(sets_of(args.prompts[:1] if args.quick else args.prompts), args.prompt_tokens, target)
    except PromptsError as error:
        parser.error(f"--prompts: {error}")


def _window(text: str) -> Window:
    try:
        width, ngram, guesses = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no window: must be W,N,G, like 7,4,7") from None
    return width, ngram, guesses
