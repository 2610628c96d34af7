"""Measure what a draft gains by learning from traffic that changes: code, then prose, then code again.

    python -m bench learning --out build/learning [--texts 240 --streams 2]

The same texts are requested in four runs, each with newly started services:

- plain: without a draft
- fixed: with an initial draft, by default of the demo draft's size with random weights
- learning: with the same draft, whose service keeps all texts; a trainer beside it trains a version on them, waits for
  the verdict on that version, and begins again
- oracle: in each phase with a draft trained in advance, on other texts of this phase's kind

Two tenants send the requests in turns, with a seed for each text. It reports the guessed share of tokens and tokens a
second over the texts of a run, the verdict on each version, the times between a user's tokens, and texts that differ
from those of the plain run. Drafts are used whether or not they pay, so that all runs do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import grpc

from bench.arguments import limit, parser_of
from bench.conditions import machine, versions
from bench.report import Report, folder, publish
from bench.serving.learning_report import plot, summary, table
from bench.systems import pair
from bench.systems.altered import random_weights
from demo.prompts import of_kind
from specdec.client import AsyncClient
from specdec.engine.model_directory import COMPLETE
from specdec.local import Stack
from specdec.v2 import draft_pb2, draft_pb2_grpc
from specdec.wire.speculation import SpeculationName

PHASES = "code", "prose", "code"
TENANTS = "one", "two"
TEMPERATURE = 0.8
PROMPT_TOKENS = 64

ORACLE_SEED = 1000
"""Seed of an oracle's training prompts: different from the seeds of the phases."""

UNDECIDED = (
    draft_pb2.DRAFT_VERSION_STATE_WAITING,
    draft_pb2.DRAFT_VERSION_STATE_LOADING,
    draft_pb2.DRAFT_VERSION_STATE_CANARY,
)
"""States of a version before the verdict."""

SERVED = (
    draft_pb2.DRAFT_VERSION_STATE_SERVING,
    draft_pb2.DRAFT_VERSION_STATE_RETIRED,
    draft_pb2.DRAFT_VERSION_STATE_ENDED,
)
"""States of a version that was promoted."""

RETRY_SECONDS, LOOK_SECONDS = 10.0, 0.5
"""Seconds until training is retried if there were too few texts, and between polls of a version's state."""


@dataclass
class Text:
    """A text as its user saw it."""

    number: int
    phase: int
    ended: float = 0.0  # seconds since the run began
    guessed: int = 0  # tokens that the draft had guessed
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # seconds between pieces


@dataclass(frozen=True)
class Plan:
    """The models of a measurement, and its numbers of texts, tokens and steps."""

    target: Path
    draft: Path  # initial draft; oracles are trained from it
    texts: int  # of a phase
    tokens: int  # of a text
    streams: int
    steps: int  # of a training
    rate: float
    oracle_steps: int


# --- traffic ------------------------------------------------------------------------------------------


def prompts_of(plan: Plan, phase: int) -> list[list[int]]:
    return of_kind(PHASES[phase], plan.texts, PROMPT_TOKENS, plan.target / "tokenizer.json", seed=phase)


async def traffic(address: str, plan: Plan, phases: Sequence[int], speculation: SpeculationName) -> list[Text]:
    """Request the texts of phases, one phase after the other, and return them in the order in which they ended."""
    found, begin = list[Text](), time.monotonic()

    async def ask(client: AsyncClient, phase: int, place: int, prompt: list[int]) -> None:
        text = Text(phase * plan.texts + place, phase)
        times = list[float]()
        async with client.generate(
            tokens=prompt,
            max_tokens=plan.tokens,
            temperature=TEMPERATURE,
            seed=text.number,
            ignore_end_token=True,
            tenant=TENANTS[place % len(TENANTS)],
            learn=True,
            speculation=speculation,
            forced=speculation != "off",
        ) as stream:
            async for chunk in stream:
                times.append(time.monotonic())
                text.tokens += chunk.tokens
                text.guessed += sum(source == "remote_draft" for source in chunk.sources)
        text.ended = time.monotonic() - begin
        text.gaps = [late - early for early, late in pairwise(times)]
        found.append(text)

    async with AsyncClient(address, timeout=600) as client:
        for phase in phases:
            waiting = iter(enumerate(prompts_of(plan, phase)))

            async def worker(phase: int = phase, waiting: Iterator[tuple[int, list[int]]] = waiting) -> None:
                for place, prompt in waiting:
                    await ask(client, phase, place, prompt)

            await asyncio.gather(*(worker() for _ in range(plan.streams)))
    return found


# --- training beside the services -----------------------------------------------------------------------


@dataclass
class TriedVersion:
    """A version, its times in seconds since the run began (`decided`: None before the verdict), and its verdict."""

    name: str
    trained: float
    decided: float | None = None
    verdict: str = "not decided"


class Trainer:
    """Makes versions of a draft, one after another, while its service runs."""

    def __init__(self, plan: Plan, service: str, versions_folder: Path, key_file: Path) -> None:
        self.tried: list[TriedVersion] = []
        self._plan = plan
        self._service = service
        self._folder = versions_folder
        self._key_file = key_file
        self._begin = time.monotonic()
        self._over = Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Train while the context is open; an error of the training is raised at its end."""
        with ThreadPoolExecutor(1, "trainer") as thread:
            training = thread.submit(self._run)
            try:
                yield
            finally:
                self._over.set()
            training.result()

    def _run(self) -> None:
        base, number = self._plan.draft, 1
        while not self._over.is_set():
            made = self._trained(base, number)
            if made is None:
                self._over.wait(RETRY_SECONDS)
                continue
            if self._promoted(made):
                base = made
            number += 1

    def _trained(self, base: Path, number: int) -> Path | None:
        """Return a new version; None if the training failed, as with too few texts, or if the run is over."""
        hidden, version = self._folder / f".{number}", self._folder / str(number)
        options = ("--traffic", self._service, "--api-key-file", str(self._key_file), "--served-labels", "--niced")
        command = train_command(self._plan, base, hidden, self._plan.steps, *options, "--threads", "1")
        with (
            tempfile.TemporaryFile("w+") as log,  # a pipe would fill up: it is read only at the end
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as process,
        ):
            while process.poll() is None:
                if self._over.wait(LOOK_SECONDS):
                    process.kill()
                    return None
            log.seek(0)
            said = log.read()
        if process.returncode or not (hidden / COMPLETE).exists():
            print(f"no version yet: {said.strip().splitlines()[-1] if said.strip() else process.returncode}")
            shutil.rmtree(hidden, ignore_errors=True)
            return None
        hidden.rename(version)
        self.tried.append(TriedVersion(version.name, time.monotonic() - self._begin))
        return version

    def _promoted(self, version: Path) -> bool:
        """Wait for the verdict on a version, and return whether it was promoted."""
        with grpc.insecure_channel(self._service) as channel:
            stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
            while not self._over.wait(LOOK_SECONDS):
                told = stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
                for found in told.versions:
                    if found.name == version.name and found.state not in UNDECIDED:
                        verdict = draft_pb2.DraftVersionState.Name(found.state).removeprefix("DRAFT_VERSION_STATE_")
                        tried = self.tried[-1]
                        tried.decided = time.monotonic() - self._begin
                        tried.verdict = "promoted" if found.state in SERVED else verdict.lower()
                        return found.state in SERVED
        return False


def train_command(plan: Plan, base: Path, out: Path, steps: int, *options: str) -> list[str]:
    trained = ("--steps", str(steps), "--rate", str(plan.rate))
    return [sys.executable, "-m", "specdec.cli", "train-draft", *map(str, (plan.target, base, out)), *trained, *options]


def oracle(plan: Plan, kind: str, place: Path) -> Path:
    """Train a draft on text of one kind: prompts that no phase uses, and the target's continuations of them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(plan.target / "tokenizer.json"))
    prompts = of_kind(kind, 4 * plan.texts, PROMPT_TOKENS, plan.target / "tokenizer.json", seed=ORACLE_SEED)
    text, out = place / f"{kind}.txt", place / f"oracle-{kind}"
    text.write_text("\n\n".join(tokenizer.decode(prompt) for prompt in prompts))
    own = ("--text", str(text), "--own-tokens", str(plan.texts * plan.tokens))
    subprocess.run(train_command(plan, plan.draft, out, plan.oracle_steps, *own), check=True, stdout=subprocess.DEVNULL)
    return out


# --- runs ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def services(plan: Plan, draft: Path | None, *options: str) -> Iterator[Stack]:
    """Run all services, each on one thread."""
    one = ("--threads", "1")
    with Stack.start(
        plan.target,
        "none" if draft is None else str(draft),
        verifier_options=one,
        draft_options=(*one, *options),
    ) as stack:
        yield stack


def run(plan: Plan, name: str, oracles: dict[str, Path], place: Path) -> tuple[list[Text], list[TriedVersion]]:
    """Return the texts of one run, in the order in which they ended, and the versions tried in it."""
    phases = range(len(PHASES))
    speculation: SpeculationName = "off" if name == "plain" else "draft"
    if name == "oracle":
        texts = list[Text]()
        for phase in phases:
            with services(plan, oracles[PHASES[phase]]) as stack:
                own = asyncio.run(traffic(stack.address, plan, [phase], speculation))
            before = texts[-1].ended if texts else 0.0
            for text in own:
                text.ended += before
            texts += own
        return texts, []
    if name != "learning":
        with services(plan, None if name == "plain" else plan.draft) as stack:
            return asyncio.run(traffic(stack.address, plan, phases, speculation)), []
    (versions_folder := place / "versions").mkdir()
    (key_file := place / "learn.key").write_text("the key of a benchmark")
    learns = ("--learn-tokens", "2000000", "--learn-key-file", str(key_file))
    with services(plan, plan.draft, *learns, "--versions", str(versions_folder), "--canary", "0.5") as stack:
        trainer = Trainer(plan, stack.addresses["draft"], versions_folder, key_file)
        with trainer.running():
            texts = asyncio.run(traffic(stack.address, plan, phases, speculation))
        return texts, trainer.tried


def measured(plan: Plan, place: Path) -> Report:
    runs: dict[str, Any] = {}
    oracles = {kind: oracle(plan, kind, place) for kind in sorted(set(PHASES))}
    plain = dict[int, list[int]]()
    for name in ("plain", "fixed", "learning", "oracle"):
        texts, tried = run(plan, name, oracles, place)
        plain = plain or {text.number: text.tokens for text in texts}
        runs[name] = summary(texts) | {
            "versions": [asdict(version) for version in tried],
            "different_texts": sum(text.tokens != plain[text.number] for text in texts),
        }
        print(f"{name}: {len(texts)} texts in {texts[-1].ended:.0f} s", flush=True)
    kept = {name: value for name, value in asdict(plan).items() if name not in ("target", "draft")}
    about = {"target": plan.target.name, "draft": plan.draft.name, "phases": PHASES, "temperature": TEMPERATURE}
    return {"machine": machine(), "versions": versions(), "plan": kept | about, "runs": runs}


def main(given: Sequence[str]) -> None:
    parser = parser_of("learning", __doc__)
    pair.add(parser)
    parser.add_argument("--untrained", action=argparse.BooleanOptionalAction, default=True, help="random first weights")
    parser.add_argument("--texts", type=int, default=240, help="texts of a phase; default: 240")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a text; default: 96")
    parser.add_argument("--streams", type=int, default=2, help="texts at once; default: 2")
    parser.add_argument("--steps", type=int, default=100, help="steps of each training; default: 100")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak of the learning rate; default: 0.001")
    parser.add_argument("--oracle-steps", type=int, default=600, help="steps of an oracle's training; default: 600")
    parser.add_argument("--out", type=folder, help="folder for learning.json, .md and .png")
    args = parser.parse_args(given)
    limit(parser, args, 1, "texts", "tokens", "streams", "steps", "oracle_steps")
    limit(parser, args, 0, "rate")
    target, draft = pair.both(parser, args)
    with tempfile.TemporaryDirectory(prefix="specdec-learning-") as name:
        place = Path(name)
        plan = Plan(
            target,
            random_weights(draft, place / "untrained") if args.untrained else draft,
            args.texts,
            args.tokens,
            args.streams,
            args.steps,
            args.rate,
            args.oracle_steps,
        )
        report = measured(plan, place)
    publish(report, args.out, "learning", table, plot)
