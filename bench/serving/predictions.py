"""Compare the predictions of `specdec evaluate` with measurements of the services.

    python -m bench predictions [--rounds 3] [--streams 1,4]
    python -m bench predictions --slower 3      # on simulated devices

Four pairs: the demo pair, the same with its target padded to 60M and to 230M parameters, and with a draft of random
weights. Each is predicted and measured with a draft service on its own core, with the draft within the verifier,
without a draft, and without speculation. Target and draft have one thread each. Services and prediction keep running
between rounds; the first round warms up, and medians of the others are reported. The cost of a message between services
is measured first (`evaluation.hop`).

With two cores, target and draft do not run side by side as on two devices, since an orchestrator and a client contend
for the same cores. With `--slower` each model has a device slower than a core by this factor. The pass times of these
devices, measured once, apply to the prediction and to the services, which sleep for the rest of a pass and leave the
cores to others (`bench.systems.long_steps`). The comparison then covers everything between passes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from bench import markdown
from bench.arguments import limit, parser_of, whole_numbers
from bench.systems.altered import random_weights
from bench.systems.long_steps import read_device, with_long_steps, write_devices
from bench.systems.specdec import Specdec
from bench.systems.system import Load, Setup
from demo.prompts import held_out
from evaluation import measurements as evaluated
from evaluation.hop import hop_seconds
from evaluation.measurements import ABSENT, LOCAL, PLAIN, REMOTE_DRAFT, Way, speed
from evaluation.pair import EngineOptions, Pair
from orchestrator.requests.parsing import parse
from orchestrator.requests.sample import Sample
from specdec.client.request import build_request
from specdec.local import DEMO, PROGRAMS
from testing.padded_model import pad_model

ONE_THREAD = ("--threads", "1")
WITHIN = 0.15
"""Maximum relative error of a prediction."""

COLUMNS = (
    "streams",
    "served",
    "tokens/s predicted",
    "measured",
    "ratio",
    "tokens a step and its ms, predicted",
    "measured, the same",
)

MODES: Mapping[Way, str] = {PLAIN: "off", ABSENT: "local", LOCAL: "local", REMOTE_DRAFT: "auto"}
"""The `speculation` of requests for each way of serving."""


@dataclass(frozen=True)
class Models:
    """A pair, by its name in the table."""

    name: str
    target: Path
    draft: Path


PAIRS = ("demo", "60M", "230M", "useless draft")
"""Names of pairs: the demo's, its target padded to this number of parameters, its target with a random draft."""


def pairs(folder: Path, names: Sequence[str] = PAIRS) -> Iterator[Models]:
    """Yield pairs by name; derived ones are written into a folder."""
    for name in names:
        match name:
            case "demo":
                yield Models(name, DEMO / "target", DEMO / "draft")
            case "useless draft":
                yield Models(name, DEMO / "target", random_weights(DEMO / "draft", folder / "useless"))
            case _:
                padded = folder / name
                pad_model(DEMO / "target", padded, int(name.removesuffix("M")) * 10**6)
                yield Models(name, padded, DEMO / "draft")


@dataclass(frozen=True)
class Speed:
    """The speed of a load: the medians of some rounds."""

    rate: float  # tokens a second
    tokens_a_step: float

    @classmethod
    def of(cls, rounds: Sequence[tuple[int, int, float]]) -> Speed:
        """Return the speed over `rounds`, each with its tokens, steps and seconds."""
        return cls(
            median(tokens / seconds for tokens, _, seconds in rounds),
            median(tokens / steps for tokens, steps, _ in rounds),
        )

    def step_ms(self, streams: int) -> float:
        """Return the milliseconds per step of each stream."""
        return 1000 * streams * self.tokens_a_step / self.rate


def samples(pair: Pair, prompts: Sequence[list[int]], tokens: int, temperature: float) -> list[Sample]:
    """Return samples like the requests of `Specdec.run`."""
    return [
        parse(
            build_request(
                tokens=prompt, max_tokens=tokens, temperature=temperature, seed=number, ignore_end_token=True
            ),
            pair.model,
        ).samples[0]
        for number, prompt in enumerate(prompts)
    ]


def given_devices(pair: Pair, file: Path, slower: float) -> None:
    """Make a pair's models compute on devices that are slower than this machine by the factor `slower`, and write the
    devices to a file."""
    loaded = {"target": pair.target, "draft": pair.draft, "local draft": pair.local_draft}
    write_devices(file, {name: each.latency for name, each in loaded.items()}, slower)
    for name, each in loaded.items():
        each.engine = with_long_steps(each.engine, lasting := read_device(file, name))
        each.latency.become(1, lasting(1))


def predicted(pair: Pair, loads: Mapping[int, Load], rounds: int, hop: float) -> dict[tuple[Way, int], Speed]:
    """Return the predicted speeds by way and streams."""
    asked = [
        evaluated.Load(samples(pair, load.prompts, load.max_tokens, load.temperature), streams)
        for streams, load in loads.items()
    ]
    found: dict[tuple[Way, int], Speed] = {}
    for way in MODES:
        figures = speed(pair, replace(way, layout=replace(way.layout, delay=hop)), *asked * (rounds + 1))
        for place, streams in enumerate(loads):
            of_load = figures[len(loads) :][place :: len(loads)]
            found[way, streams] = Speed.of([(each.tokens, each.steps, each.seconds) for each in of_load])
    return found


def measured(
    models: Models, loads: Mapping[int, Load], rounds: int, devices: Path | None
) -> dict[tuple[Way, int], Speed]:
    """Return the measured speeds by way and streams, on the devices of a file or on this machine."""
    setup = Setup(models.target, models.draft, "float32", streams=max(loads), context=1024)
    programs: Mapping[str, tuple[str, ...]] = PROGRAMS
    if devices is not None:
        programs = PROGRAMS | {
            role: ("bench.systems.pod", role, "--devices", str(devices)) for role in ("verifier", "draft")
        }
    start = partial(Specdec.start, setup, verifier_options=ONE_THREAD, programs=programs)
    systems: dict[tuple[Way, ...], Callable[[], AbstractContextManager[Specdec]]] = {
        (PLAIN, ABSENT): start,
        (LOCAL,): partial(start, local_draft=models.draft),
        (REMOTE_DRAFT,): partial(start, models.draft, draft_options=ONE_THREAD),
    }
    answers: dict[tuple[Way, int], list[tuple[int, int, float]]] = {}
    with ExitStack() as exits:
        running = {ways: exits.enter_context(system()) for ways, system in systems.items()}
        for number in range(rounds + 1):  # the first one warms up
            for ways, system in running.items():
                for way in ways:
                    for streams, load in loads.items():
                        answer = system.run(load, MODES[way])
                        if number:
                            assert answer.steps is not None
                            each = (answer.tokens, answer.steps, answer.seconds)
                            answers.setdefault((way, streams), []).append(each)
    return {key: Speed.of(each) for key, each in answers.items()}


def main(given: Sequence[str]) -> None:
    parser = parser_of("predictions", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=whole_numbers, default=[1, 4])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--slower", type=float, default=1.0, help="slow-down of a device relative to a core")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--quick", action="store_true", help="the demo pair alone, one round")
    args = parser.parse_args(given)
    limit(parser, args, 1, "rounds", "streams", "tokens")
    limit(parser, args, 0, "temperature")
    limit(parser, args, 1, "slower")
    loads = {
        streams: Load(held_out(streams, tokens=64, seed=3), args.tokens, args.temperature) for streams in args.streams
    }
    rounds = 1 if args.quick else args.rounds
    hop = hop_seconds()
    print(f"a message from one service to another: {1000 * hop:.2f} ms\n")
    print(markdown.head(["pair", *COLUMNS]), flush=True)
    off: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for models in pairs(Path(folder), PAIRS[:1] if args.quick else args.pairs):
            pair = Pair(
                models.target, models.draft, EngineOptions(dtype="float32"), EngineOptions("onnx", dtype="float32")
            )
            devices = None if args.slower == 1.0 else Path(folder, f"{models.name}.json")
            if devices is not None:
                given_devices(pair, devices, args.slower)
            guess = predicted(pair, loads, rounds, hop)
            del pair
            truth = measured(models, loads, rounds, devices)
            for (way, streams), found in truth.items():
                told = guess[way, streams]
                ratio = told.rate / found.rate
                cells = [models.name, streams, way.name, f"{told.rate:.0f}", f"{found.rate:.0f}", f"{ratio:.2f}"]
                cells += [f"{each.tokens_a_step:.2f}, {each.step_ms(streams):.1f}" for each in (told, found)]
                print(markdown.row(cells), flush=True)
                if abs(ratio - 1) > WITHIN:
                    off.append(f"{models.name}, {streams}, {way.name}")
    print(f"\nmore than {WITHIN:.0%} off: {'; '.join(off) or 'none'}")
