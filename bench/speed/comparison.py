"""A comparison: the systems to start, and the rounds in which all their configurations take turns at the same loads."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.speed.config import SpeedConfig
from bench.speed.measurements import Measurement
from bench.speed.step_times import StepTimes, Times, of_answer
from bench.systems import (
    bad_drafts,
    llama_cpp,
    specdec,
    transformers_batching,
    transformers_generate,
    vllm,
    vllm_verifier,
)
from bench.systems.processor_time import DISTURBED, Watch, await_quiet
from bench.systems.system import Answer, Configuration, Launch, Load, NotServingError, SystemUnderTest
from demo.prompts import MIXED, of_kind
from specdec.client import SpecdecError
from specdec.wire.decisions import PROPOSERS


@dataclass(frozen=True)
class Cell:
    """A cell of the comparison: the load of all configurations in a round."""

    kind: str
    streams: int
    temperature: float


def launches(config: SpeedConfig) -> list[Launch]:
    """Return the systems under test, each with its configurations, in the order of their turns."""
    setup = config.setup
    found = specdec.launches(setup, config.windows, config.heads)
    if config.bad_drafts:
        found += bad_drafts.launches(setup)
    if config.transformers:
        found += transformers_generate.launches(setup) + transformers_batching.launches(setup)
    if config.vllm_python is not None:
        found += vllm.launches(setup, config.vllm_python) + vllm_verifier.launches(setup, config.vllm_python)
    if config.llama is not None:
        found += llama_cpp.launches(setup, config.llama)
    plain, *others = found  # the baseline first
    return [plain, *(each for each in others if any(word in each.name for word in config.only))]


def cells(config: SpeedConfig) -> list[Cell]:
    return [
        Cell(kind, streams, temperature)
        for temperature in config.temperatures
        for streams in config.streams
        for kind in (config.kinds if streams == 1 else [MIXED])
    ]


class Comparison:
    """All rounds of a comparison. A system that fails is left out of the rest with all its configurations, and the
    reason is recorded."""

    def __init__(self, config: SpeedConfig, running: dict[Launch, SystemUnderTest], step_times: StepTimes) -> None:
        self.running = running
        self.failed: dict[str, str] = {}  # reasons, by configuration
        self.measurements: list[Measurement] = []
        self.times: list[Times] = []
        self._config = config
        self._step_times = step_times
        self._texts: dict[tuple[Any, ...], int] = {}

    def run(self, console: Console) -> None:
        """Run all rounds; the first one warms up and is dropped."""
        plan = cells(self._config)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            work = bar.add_task("rounds", total=(self._config.rounds + 1) * len(plan))
            for number in range(self._config.rounds + 1):
                times = self._step_times.measure()
                self.times += [times] if number else []
                for cell in plan:
                    self._measure_all(cell, number, times)
                    bar.advance(work)

    def _measure_all(self, cell: Cell, number: int, times: Times) -> None:
        load = self._load(cell, 1000 * number + cell.streams)
        everyone = [session for system in self.running.values() for session in system.sessions().values()]
        await_quiet(everyone, DISTURBED, self._config.patience_seconds)
        for launch, system in list(self.running.items()):
            others = [session for session in everyone if session not in system.sessions().values()]
            for configuration in launch.configurations:
                if configuration.one_stream and cell.streams > 1:
                    continue
                watch = Watch(system.sessions(), others)
                try:
                    if configuration.adaptive and not number:
                        self._teach(system, configuration, cell)
                    answer = system.run(load, configuration.mode)
                except (NotServingError, SpecdecError) as error:
                    place = f"{cell.streams} streams of {cell.kind}"
                    self.failed |= {
                        other.name: f"{place}: {configuration.name}, of the same system, failed"
                        for other in launch.configurations
                    }
                    self.failed[configuration.name] = f"{place}: {error}"
                    del self.running[launch]
                    break
                if number:
                    self.measurements.append(self._measured(configuration.name, cell, number, answer, times, watch))

    def _load(self, cell: Cell, seed: int) -> Load:
        config = self._config
        tokenizer = config.target / "tokenizer.json"
        prompts = of_kind(cell.kind, cell.streams, config.prompt_tokens, tokenizer, config.seed + seed)
        return Load(prompts, config.tokens, cell.temperature)

    def _teach(self, system: SystemUnderTest, configuration: Configuration, cell: Cell) -> None:
        """Run other loads until the system has had time to find the best speculation for them."""
        begin = time.monotonic()
        for number in itertools.count(1):
            system.run(self._load(cell, -1000 * number + cell.streams), configuration.mode)
            if time.monotonic() - begin >= self._config.learning_seconds:
                return

    def _measured(self, name: str, cell: Cell, number: int, answer: Answer, times: Times, watch: Watch) -> Measurement:
        cores, waiting, foreign = watch.cores()
        ideal = acceptance = text = None
        if answer.steps and answer.candidates is not None:
            each = of_answer(answer.tokens, answer.steps, answer.candidates, answer.sources)
            ideal = self._step_times.ideal(times, cell.streams, self._config.prompt_tokens, answer.tokens, **each)
            accepted = sum(answer.sources.get(source, 0) for source in PROPOSERS)
            acceptance = accepted / answer.candidates if answer.candidates else None
        if answer.texts is not None:
            key = (cell, number, tuple(map(tuple, answer.texts)))
            text = self._texts.setdefault(key, len(self._texts))
        return Measurement(
            configuration=name,
            **asdict(cell),
            round=number,
            tokens_per_second=answer.tokens / answer.seconds,
            first=answer.first,
            pauses=answer.pauses,
            tokens_per_step=answer.tokens / answer.steps if answer.steps else None,
            acceptance=acceptance,
            sources=dict(answer.sources),
            ideal=ideal,
            cores=cores,
            waiting_cores=waiting,
            foreign_cores=foreign,
            text=text,
        )
