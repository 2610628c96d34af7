"""Seconds from a command until the first token of a short prompt: `specdec up`, `vllm serve` and llama.cpp's
`llama-server`, each started as its users start it.

    python -m bench first-token
    python -m bench first-token --vllm-python build/vllm/bin/python --llama-server build/llama/build/bin/llama-server \\
        --llama-gguf build/llama/target.gguf --out build/first-token

The time begins when the command is started, and ends when one token has come over the server's own API (gRPC, or
OpenAI's completions over HTTP). Commands have their own defaults, dtype and compilation included; all deviations are in
their name. A command's persistent cache (compiled loops, compiled graphs) has its own folder: the first start finds it
empty, the next one filled by the first. The page cache holds all files throughout. In a round all commands take turns,
each with a first and a next start; every other round reverses the order. Each start first waits for a quiet machine,
for at most --patience seconds. Writes first-token.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import markdown
from bench.arguments import limit, parser_of
from bench.conditions import INSTRUCTIONS, machine, model_name, versions
from bench.report import CUT_OFF, Report, folder, publish
from bench.serving.commands import Command, llama_server, specdec_up, vllm_serve
from bench.systems import pair, peer_options
from bench.systems.processor_time import DISTURBED, await_quiet
from bench.systems.system import NotServingError
from demo.prompts import held_out
from specdec.client import SpecdecError

PROMPT_TOKENS = 16
FIRST, NEXT, EVERY = "first", "next", "every"
"""Kinds of starts: with an empty cache, with the first start's cache, and of a command without a cache."""
COLUMNS = {"ready, s": "ready", "first token, s": "token"}
"""Columns of the table for each kind, with their fields."""


@dataclass(frozen=True)
class Start:
    command: str
    kind: str
    round: int
    ready: float  # seconds until it reported readiness
    token: float  # seconds until the first token had come
    foreign_cores: float  # cores that other processes used before the start


def timed(command: Command, cache: Path, prompt: list[int]) -> tuple[float, float]:
    """Start a command, query it and end it; return the seconds until it was ready, and until its first token."""
    begin = time.perf_counter()
    with command.start(cache) as ask:
        ready = time.perf_counter() - begin
        ask(prompt)
        return ready, time.perf_counter() - begin


def measure(commands: Sequence[Command], rounds: int, patience: float) -> dict[str, Any]:
    """Return all starts, and why commands failed; a command that failed is not started again. After Ctrl-C, return the
    measurements so far."""
    starts, failed, cut_off = list[Start](), dict[str, str](), False
    (prompt,) = held_out(1, PROMPT_TOKENS)
    try:
        for number in range(1, rounds + 1):
            for command in commands if number % 2 else reversed(commands):
                if command.name in failed:
                    continue
                try:
                    starts += _turn(command, number, prompt, patience)
                except (NotServingError, SpecdecError, OSError) as error:
                    failed[command.name] = str(error)
    except KeyboardInterrupt:
        cut_off = True
    return {"starts": [asdict(each) for each in starts], "failed": failed} | ({CUT_OFF: True} if cut_off else {})


def _turn(command: Command, number: int, prompt: list[int], patience: float) -> Iterator[Start]:
    """Yield a round's starts of one command, each on a quiet machine, or after `patience` seconds."""
    with tempfile.TemporaryDirectory() as cache:
        for kind in (FIRST, NEXT) if command.keeps else (EVERY,):
            taken = await_quiet((), DISTURBED, patience)
            ready, token = timed(command, Path(cache), prompt)
            print(f"round {number}, {command.name}, {kind} start: {token:.1f} s", file=sys.stderr, flush=True)
            yield Start(command.name, kind, number, round(ready, 2), round(token, 2), round(taken, 2))


def table(report: Report) -> str:
    where, starts = report["machine"], report["starts"]
    taken = [each["foreign_cores"] for each in starts]
    known = ", ".join(where["instructions"]) or f"none of {', '.join(INSTRUCTIONS)}"
    lines = [
        f"Target: {report['model']}. Draft: {report['draft'] or 'none'}.",
        f"A prompt of {PROMPT_TOKENS} tokens. {where['cores']} cores of {where['processor']} with {known}. "
        f"Rounds: {report['rounds']}; medians, in brackets the least and the most. "
        f"Others took {max(taken, default=0.0):.1f} cores at most before a start.",
        "",
    ]
    names = dict.fromkeys(each["command"] for each in starts)
    kinds = {f"{kind} start: {what}": (kind, name) for kind in (FIRST, NEXT) for what, name in COLUMNS.items()}
    rows = ([f"`{name}`", *(_cell(starts, name, *each) for each in kinds.values())] for name in names)
    lines += markdown.table(["", *kinds], rows)
    lines += [f"\nNot measured: {name}: {reason}" for name, reason in report["failed"].items()]
    return "\n".join(lines) + "\n"


def _cell(starts: list[dict[str, Any]], name: str, kind: str, what: str) -> str:
    found = _of(starts, name, kind, what)
    return f"{statistics.median(found):.1f} ({min(found):.1f}, {max(found):.1f})" if found else "-"


def _of(starts: list[dict[str, Any]], name: str, kind: str, what: str) -> list[float]:
    """Return the seconds of all starts of this kind; a start of a command without a cache counts as both kinds."""
    return [each[what] for each in starts if each["command"] == name and each["kind"] in (kind, EVERY)]


def parsed(given: Sequence[str]) -> tuple[list[Command], argparse.Namespace]:
    """Return the commands to measure, in order, and all options."""
    parser = parser_of("first-token", __doc__)
    pair.add(parser)
    peer_options.add(parser)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to wait for a quiet machine each time")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    limit(parser, args, 1, "rounds")
    limit(parser, args, 0, "patience")
    args.target, args.draft = pair.chosen(parser, args)
    commands = specdec_up(args.target.resolve(), args.draft and args.draft.resolve())
    if (python := peer_options.vllm_python(parser, args)) is not None:
        commands += vllm_serve(python, args.target.resolve())
    if (llama := peer_options.llama_files(parser, args)) is not None:
        commands += llama_server(llama)
    return commands, args


def main(given: Sequence[str]) -> None:
    commands, args = parsed(given)
    report = {
        "model": model_name(args.target),
        "draft": args.draft and model_name(args.draft),
        "rounds": args.rounds,
        "machine": machine(),
        "versions": versions(),
        **measure(commands, args.rounds, args.patience),
    }
    publish(report, args.out, "first-token", table)
