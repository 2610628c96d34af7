"""Measure an engine's step time as a multiple of the memory roofline, for model shapes with random weights.

    python -m bench engine --shape 60m --device cpu --out build/engine
    python -m bench engine --shape llama-3.1-8b --device cuda --dtype bfloat16 --synthetic-acceptance 0.8
    python -m bench engine --config /models/mine/config.json --device cuda --dtype bfloat16

A step computes n new tokens in each of several texts; "sessions" is the number of texts, "context" their length. The
roofline is the time to read the weights (without the input embedding), keys and values at the bandwidth of a large copy
on this device (bytes read plus bytes written). "host" is the time until the call returns; if the engine's forward pass
copies logits to the host, that includes waiting for the device. Measured for comparison, on the same shape:
transformers' forward pass with a growing cache, with a static cache, and compiled with a static cache; and its
continuous batching (one token a step, its whole loop included).

--synthetic-acceptance P also runs the verifier's step loop, plain and with injected candidates, each right with
probability P. This is labelled SYNTHETIC, since a model with random weights has no draft. Writes engine.json and
engine.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from bench.arguments import limit, parser_of, whole_numbers
from bench.conditions import machine, versions
from bench.engine import synthetic
from bench.engine.device import Device
from bench.engine.report import table
from bench.engine.shapes import SHAPES, Combination, Sizes, roofline_seconds, sizes, split, write
from bench.engine.systems import SpecdecEngine, SteppedSystem, median_step
from bench.engine.transformers_steps import KINDS, PEERS, ContinuousBatching, transformers_model
from bench.report import CUT_OFF, Report, folder, publish
from specdec.engine.cpu_count import MAX_THREADS
from specdec.engine.engines.loading import load_engine
from specdec.engine.hf.pretrained import DTYPES
from specdec.engine.hf.random_weights import RandomWeights
from specdec.engine.memory import MIN_SLOTS
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Dtype, Kind, Placement
from specdec.engine.preflight.device import check_device
from specdec.engine.unsupported import UnsupportedModelError
from specdec.engine.working_memory import MAX_STEP_CANDIDATES

ENGINES = [kind for kind in get_args(Kind) if kind != "onnx"]
"""Engines to measure: all except onnx, since random weights are not exported."""

SPARE = 0.9
"""Fraction of the free memory that a combination may use."""

WIDTHS = (2, 4, 8)
"""Candidates per session and step, with synthetic speculation."""

QUICK_PEERS = ("eager-static",)
"""Peers with --quick: compiling would take a minute for every combination."""

PROMPT, LENGTH = 128, 192
"""Tokens of the prompt and of the output of a synthetic text."""


class EngineBench:
    """The benchmark of engines, which logs its progress on stderr."""

    def __init__(self, args: argparse.Namespace, directory: RandomWeights) -> None:
        self.args = args
        self.directory = directory
        self.device = Device(args.device)
        self.item_bytes = DTYPES[args.dtype].itemsize
        self.sizes: Sizes = sizes(directory.path, self.item_bytes)
        self.rows: list[dict[str, Any]] = []
        self.synthetic: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._console = Console(stderr=True, highlight=False)

    def run(self) -> Report:
        """Measure and return the report. Ctrl-C ends the measurement early, or raises if nothing is measured yet."""
        args = self.args
        self._report("bandwidth")
        bandwidth = self.device.bandwidth()
        wanted = [Combination(n, c, s) for s in args.sessions for c in args.contexts for n in args.tokens]
        # Weights and a combination's memory are allocated together: both must fit into the memory free now.
        free_now = int(SPARE * self.device.free_bytes())
        fitting, self.left_out = split(self.sizes, wanted, self.item_bytes, self.directory.vocabulary, free_now)
        report: Report = {"name": self.directory.name, "bandwidth": bandwidth, "sizes": vars(self.sizes)}
        report |= {"exact": args.exact, "rows": self.rows, "synthetic": self.synthetic, "left_out": self.left_out}
        try:
            if fitting:
                report["numerics"] = self._specdec(fitting, bandwidth)
                self._peers(fitting, bandwidth)
        except KeyboardInterrupt:
            if not self.rows:
                raise
            report[CUT_OFF] = True
        return report

    def _specdec(self, fitting: list[Combination], bandwidth: float) -> str:
        """Measure specdec's engine; return its numerics fingerprint."""
        args = self.args
        self._report("loading")
        capacity = max(MIN_SLOTS, 1 + max(what.slots for what in fitting))  # the exactness check needs slots, too
        prompts = args.synthetic_sessions * (PROMPT + LENGTH + 64) + 2 * MAX_STEP_CANDIDATES
        slots = max(capacity, prompts) if args.synthetic_acceptance else capacity
        placement = Placement(args.engine, args.dtype, args.device, slots)
        engine = load_engine(self.directory, placement, threads=(args.threads,), exact=args.exact)
        self._measure(SpecdecEngine(engine, self.device), fitting, bandwidth)
        if args.synthetic_acceptance:
            for sessions in sorted({1, args.synthetic_sessions}):
                self._report(f"synthetic acceptance, {sessions} sessions")
                self.synthetic += synthetic.measure(
                    engine,
                    acceptance=args.synthetic_acceptance,
                    widths=WIDTHS,
                    sessions=sessions,
                    prompt=PROMPT,
                    length=LENGTH,
                    rounds=args.synthetic_rounds,
                )
        numerics = engine.numerics
        del engine
        self.device.free()
        return numerics

    def _peers(self, fitting: list[Combination], bandwidth: float) -> None:
        if not self.args.peers:
            return
        with transformers_model(self.directory, self.args.dtype, self.device) as model:
            for name in self.args.peers:
                chosen = fitting
                if name == ContinuousBatching.name:
                    chosen = [what for what in fitting if what.tokens == 1]
                self._measure(KINDS[name](model, self.device), chosen, bandwidth)
                self.device.free()

    def _measure(self, system: SteppedSystem, chosen: list[Combination], bandwidth: float) -> None:
        for what in chosen:
            self._report(
                f"{system.name}: {what.sessions} sessions, {what.context} tokens of context, n = {what.tokens}"
            )
            try:
                found = median_step(system, what, self.args.seconds, self.args.repeats)
            except Exception as error:  # other systems may raise anything; the rest are still measured
                reason = (str(error).strip().splitlines() or [""])[0][:160]
                self.left_out.append(
                    f"{system.name}, {what.sessions} sessions, {what.context} tokens of context, "
                    f"{what.tokens} tokens: left out, {type(error).__name__}: {reason}"
                )
                self.device.free()
                continue
            roofline = 1e3 * roofline_seconds(self.sizes, what, bandwidth)
            about = {"system": system.name, **vars(what), "roofline_ms": roofline}
            self.rows.append(about | found | {"over_roofline": found["ms"] / roofline})

    def _report(self, what: str) -> None:
        if self._console.is_terminal:
            self._console.print(f"[dim]{what}[/dim]")


def peers(text: str) -> list[str]:
    chosen = [] if text == "none" else text.split(",")
    for name in chosen:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PEERS)}")
    return chosen


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("engine", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=list(SHAPES), default="60m", help="shape of the model (default: %(default)s)")
    what.add_argument("--config", type=Path, help="config.json of another model, or its directory")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32", help="default: %(default)s")
    parser.add_argument("--engine", choices=ENGINES, default="torch", help="default: %(default)s")
    parser.add_argument("--exact", action="store_true", help="have the engine make rows independent of their batch")
    parser.add_argument("--tokens", type=whole_numbers, default=[1, 4, 8, 16, 32, 64], help="n; default: 1,4,...,64")
    parser.add_argument("--contexts", type=whole_numbers, default=[1024, 8192], help="default: 1024,8192")
    parser.add_argument("--sessions", type=whole_numbers, default=[1, 32], help="default: 1,32")
    parser.add_argument("--peers", type=peers, help=f"systems to compare, or none; default: {','.join(PEERS)}")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads; default: all cores")
    parser.add_argument(
        "--repeats", type=int, default=50, help="maximum number of measured steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="approximate time for one combination (default: %(default)g)"
    )
    parser.add_argument("--synthetic-acceptance", type=float, help="probability that an injected candidate is right")
    parser.add_argument(
        "--synthetic-sessions", type=int, default=8, help="also measured with one session (default: %(default)s)"
    )
    parser.add_argument(
        "--synthetic-rounds", type=int, default=3, help="rounds, plain and speculative in turns (default: %(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="n = 1 and 8, 1 and 4 sessions, 256 tokens of context; one peer, unless --peers is given",
    )
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.tokens, args.contexts, args.sessions = [1, 8], [256], [1, 4]
        args.peers = list(QUICK_PEERS) if args.peers is None else args.peers
        args.seconds, args.synthetic_sessions, args.synthetic_rounds = min(args.seconds, 0.3), 4, 1
    args.peers = list(PEERS) if args.peers is None else args.peers
    limit(parser, args, 1, "tokens", "contexts", "sessions", "threads", "repeats")
    limit(parser, args, 1, "synthetic_sessions", "synthetic_rounds")
    if args.synthetic_acceptance is not None and not 0 < args.synthetic_acceptance <= 1:
        parser.error(f"--synthetic-acceptance is {args.synthetic_acceptance:g}, must be above 0 and at most 1")
    if args.threads > MAX_THREADS:
        parser.error(f"--threads is {args.threads}, must be at most {MAX_THREADS}")
    if not 0 < args.seconds < float("inf"):
        parser.error(f"--seconds is {args.seconds:g}, must be above 0")
    if args.config is not None and not args.config.is_dir() and args.config.name != "config.json":
        parser.error(f"--config is {args.config}, must be a config.json or the directory that has it")
    try:
        check_device(Placement(device=args.device))
    except UnsupportedModelError as error:
        parser.error(f"--{error}")
    return args


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    torch.set_num_threads(args.threads)
    asked = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items() if name != "out"}
    try:
        with tempfile.TemporaryDirectory(prefix="specdec-shape-") as scratch:
            if args.config is None:
                directory = RandomWeights(write(SHAPES[args.shape], Path(scratch) / args.shape))
            else:
                directory = RandomWeights(args.config if args.config.is_dir() else args.config.parent)
            bench = EngineBench(args, directory)
            found = bench.run()
    except (ModelDirectoryError, UnsupportedModelError) as error:
        sys.exit(f"python -m bench engine: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    report = {"asked": asked, "machine": machine() | bench.device.facts(), "versions": versions()} | found
    publish(report, args.out, "engine", table)
