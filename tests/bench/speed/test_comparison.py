"""Rounds of a comparison: failing systems are left out, adaptive ones are warmed up, and large ones run apart."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

from rich.console import Console

from bench.speed.comparison import Comparison
from bench.speed.config import parsed
from bench.speed.step_times import StepTimes
from bench.systems.specdec import PLAIN
from bench.systems.system import Answer, Configuration, Launch, Load, NotServingError

SHORT = ["--kinds", "code", "--temperatures", "0", "--tokens", "4", "--patience", "0", "--learning", "0"]


class Broken:
    """A system that fails on every load."""

    about: Mapping[str, Any] = MappingProxyType({})

    def run(self, load: Load, mode: str = "") -> Answer:
        raise NotServingError("it is broken")

    def sessions(self) -> Mapping[str, int]:
        return {}


class Steady(Broken):
    """A system that gives a token every 10 ms."""

    def run(self, load: Load, mode: str = "") -> Answer:
        times = [(0.01 * (number + 1), 1) for number in range(load.max_tokens)]
        return Answer(0.01 * load.max_tokens, [times for _ in load.prompts], steps=load.max_tokens * len(load.prompts))


class NoSteps(StepTimes):
    def __init__(self) -> None:
        pass

    def measure(self) -> dict[str, float]:
        return {}


def launch(name: str, system: Broken, *configurations: str) -> Launch:
    return Launch(name, lambda: nullcontext(system), tuple(map(Configuration, configurations)))


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    config = parsed([*SHORT, "--streams", "1,2", "--rounds", "2"])
    drafted = launch("drafted", Broken(), "specdec drafted", "specdec both")
    comparison = Comparison(config, [drafted, launch("batching", Steady(), "batching")], NoSteps())
    comparison.run(Console(file=io.StringIO()))
    assert comparison.failed == {
        "specdec drafted": "1 streams of code: it is broken",
        "specdec both": "1 streams of code: specdec drafted, of the same system, failed",
    }
    assert [(m.configuration, m.streams, m.round) for m in comparison.measurements] == [
        ("batching", streams, number) for number in (1, 2) for streams in (1, 2)
    ]
    assert [round(m.tokens_per_second) for m in comparison.measurements] == [100, 200, 100, 200]


class Counting(Steady):
    """Records its loads."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[list[int]]]] = []

    def run(self, load: Load, mode: str = "") -> Answer:
        self.asked.append((mode, load.prompts))
        return super().run(load, mode)


def test_who_learns_is_asked_for_other_prompts_first() -> None:
    options = [*SHORT, "--streams", "2", "--rounds", "1"]
    drafted, plain = Counting(), Counting()
    learning = Configuration("drafted", "draft", adaptive=True), Configuration("both", "auto", adaptive=True)
    systems = [launch("alone", plain, PLAIN), Launch("drafts", lambda: nullcontext(drafted), learning)]
    Comparison(parsed(options), systems, NoSteps()).run(Console(file=io.StringIO()))
    first, second = (prompts for _, prompts in plain.asked)
    assert [mode for mode, _ in drafted.asked] == ["draft", "draft", "auto", "auto", "draft", "auto"]
    learnt = [drafted.asked[at][1] for at in (0, 2)]
    assert [drafted.asked[at][1] for at in (1, 3, 4, 5)] == [first, first, second, second]
    assert all(prompt not in first + second for prompts in learnt for prompt in prompts)


def test_apart_one_system_is_loaded_at_a_time_and_warmed_up_in_each_round() -> None:
    loaded: list[str] = []
    history: list[tuple[str, int]] = []

    class Alone(Steady):
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, load: Load, mode: str = "") -> Answer:
            assert loaded == [self.name]
            history.append((self.name, len(load.prompts)))
            return super().run(load, mode)

    @contextmanager
    def start(name: str) -> Iterator[Alone]:
        loaded.append(name)
        yield Alone(name)
        loaded.remove(name)

    @contextmanager
    def too_large() -> Iterator[Alone]:
        raise NotServingError("there is no room")
        yield

    systems = [
        Launch("one", lambda: start("one"), (Configuration("one"),)),
        Launch("large", too_large, (Configuration("large"),)),
        Launch("two", lambda: start("two"), (Configuration("two"),)),
    ]
    comparison = Comparison(parsed([*SHORT, "--streams", "1,3", "--rounds", "2", "--apart"]), systems, None)
    comparison.run(Console(file=io.StringIO()))
    turn = [1, 3] * 2  # a warm-up round, and one that counts
    assert history == [(name, streams) for _ in range(2) for name in ("one", "two") for streams in turn]
    assert [(m.configuration, m.round) for m in comparison.measurements] == [
        (name, number) for number in (1, 2) for name in ("one", "two") for _ in range(2)
    ]
    assert comparison.failed == {"large": "there is no room"}
    assert comparison.times == []
    assert {m.ideal for m in comparison.measurements} == {None}
