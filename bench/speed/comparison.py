"""A comparison: the systems to start, and the rounds in which all their configurations get the same loads."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from bench.systems.processor_time import DISTURBED, Watch, await_quiet, peak_bytes
from bench.systems.system import Answer, Configuration, Launch, Load, NotServingError, SystemUnderTest
from demo.prompts import MIXED
from specdec.client import SpecdecError
from specdec.local import LocalError
from specdec.wire.decisions import PROPOSERS

Running = dict[Launch, SystemUnderTest]
"""The systems loaded at present."""


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
        for kind in (config.prompts.kinds if streams == 1 else [MIXED])
    ]


class Comparison:
    """All rounds of a comparison. A system that fails is left out of the rest with all its configurations, and the
    reason is recorded."""

    def __init__(self, config: SpeedConfig, launches: Sequence[Launch], step_times: StepTimes | None) -> None:
        """Compare the systems of `launches`. Without `step_times` no ideal rate is computed."""
        self.about: dict[str, dict[str, Any]] = {}  # versions and flags of the systems, by name
        self.peak_bytes: dict[str, dict[str, int]] = {}  # of the parts of the systems, by name
        self.failed: dict[str, str] = {}  # reasons, by system or configuration
        self.measurements: list[Measurement] = []
        self.times: list[Times] = []
        self._config = config
        self._launches = list(launches)  # without those that failed
        self._step_times = step_times
        self._texts: dict[tuple[Any, ...], int] = {}

    def run(self, console: Console) -> None:
        """Run all rounds."""
        plan = cells(self._config)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            loads = self._config.rounds * 2 if self._config.apart else self._config.rounds + 1
            work = bar.add_task("rounds", total=len(self._launches) * loads * len(plan))
            for launches, numbers in self._groups():
                with self._loaded(launches, partial(bar.update, work)) as running:
                    for number in numbers:
                        times = {} if self._step_times is None else self._step_times.measure()
                        if number and times:
                            self.times.append(times)
                        for cell in plan:
                            self._measure_all(running, cell, number, times)
                            bar.advance(work, len(launches))

    def _groups(self) -> Iterator[tuple[Sequence[Launch], Sequence[int]]]:
        """Yield systems to load together, and their rounds; round 0 warms up, and is dropped."""
        rounds = range(1, self._config.rounds + 1)
        if not self._config.apart:
            yield list(self._launches), [0, *rounds]
            return
        for number in rounds:
            for launch in list(self._launches):
                yield [launch], [0, number]

    @contextlib.contextmanager
    def _loaded(self, launches: Sequence[Launch], tell: Callable[..., None]) -> Iterator[Running]:
        """Load systems, and end them when the context exits."""
        running: Running = {}
        with contextlib.ExitStack() as exits:
            for launch in launches:
                tell(description=f"loading: {launch.name}")
                try:
                    running[launch] = exits.enter_context(launch.start())
                except (NotServingError, LocalError, OSError) as error:
                    self.failed[launch.name] = str(error)
                    self._launches.remove(launch)
                else:
                    self.about[launch.name] = dict(running[launch].about)
            tell(description="rounds" if len(launches) > 1 else launches[0].name)
            try:
                yield running
            finally:
                for launch, system in running.items():
                    peaks = self.peak_bytes.setdefault(launch.name, {})
                    peaks |= {part: max(peaks.get(part, 0), peak_bytes(id_)) for part, id_ in system.sessions().items()}

    def _measure_all(self, running: Running, cell: Cell, number: int, times: Times) -> None:
        load = self._load(cell, 1000 * number + cell.streams)
        everyone = [session for system in running.values() for session in system.sessions().values()]
        await_quiet(everyone, DISTURBED, self._config.patience_seconds)
        for launch, system in list(running.items()):
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
                    del running[launch]
                    self._launches.remove(launch)
                    break
                if number:
                    measured = self._measured(configuration.name, cell, number, load, answer, times, watch)
                    self.measurements.append(measured)

    def _load(self, cell: Cell, seed: int) -> Load:
        config = self._config
        prompts = config.prompts.of(cell.kind, cell.streams, config.seed + seed)
        return Load(prompts, config.tokens, cell.temperature)

    def _teach(self, system: SystemUnderTest, configuration: Configuration, cell: Cell) -> None:
        """Run other loads until the system has had time to find the best speculation for them."""
        begin = time.monotonic()
        for number in itertools.count(1):
            system.run(self._load(cell, -1000 * number + cell.streams), configuration.mode)
            if time.monotonic() - begin >= self._config.learning_seconds:
                return

    def _measured(
        self, name: str, cell: Cell, number: int, load: Load, answer: Answer, times: Times, watch: Watch
    ) -> Measurement:
        cores, waiting, foreign = watch.cores()
        ideal = acceptance = text = None
        if answer.steps and answer.candidates is not None:
            figures = of_answer(answer.tokens, answer.steps, answer.candidates, answer.sources)
            if self._step_times is not None:
                prompt = sum(map(len, load.prompts)) // cell.streams
                ideal = self._step_times.ideal(times, cell.streams, prompt, answer.tokens, **figures)
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
