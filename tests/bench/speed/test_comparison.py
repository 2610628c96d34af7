"""Rounds of a comparison: failing systems are left out, and adaptive ones are warmed up."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from rich.console import Console

from bench.speed.comparison import Comparison
from bench.speed.config import parsed
from bench.speed.step_times import StepTimes
from bench.systems.specdec import PLAIN
from bench.systems.system import Answer, Configuration, Launch, Load, NotServingError, SystemUnderTest


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


def launch(name: str, *configurations: str) -> Launch:
    return Launch(name, lambda: nullcontext(Broken()), tuple(map(Configuration, configurations)))


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    config = parsed(
        [
            "--kinds",
            "code",
            "--streams",
            "1,2",
            "--temperatures",
            "0",
            "--rounds",
            "2",
            "--tokens",
            "4",
            "--patience",
            "0",
        ]
    )
    drafted, batching = launch("drafted", "specdec drafted", "specdec both"), launch("batching", "batching")
    running: dict[Launch, SystemUnderTest] = {drafted: Broken(), batching: Steady()}
    comparison = Comparison(config, running, NoSteps())
    comparison.run(Console(file=io.StringIO()))
    assert comparison.failed == {
        "specdec drafted": "1 streams of code: it is broken",
        "specdec both": "1 streams of code: specdec drafted, of the same system, failed",
    }
    assert list(comparison.running) == [batching]
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
    options = [
        "--kinds",
        "code",
        "--streams",
        "2",
        "--temperatures",
        "0",
        "--rounds",
        "1",
        "--tokens",
        "4",
        "--patience",
        "0",
        "--learning",
        "0",
    ]
    drafted, plain = Counting(), Counting()
    learning = Configuration("drafted", "draft", adaptive=True), Configuration("both", "auto", adaptive=True)
    running: dict[Launch, SystemUnderTest] = {
        launch("alone", PLAIN): plain,
        Launch("drafts", lambda: nullcontext(drafted), learning): drafted,
    }
    Comparison(parsed(options), running, NoSteps()).run(Console(file=io.StringIO()))
    first, second = (prompts for _, prompts in plain.asked)
    assert [mode for mode, _ in drafted.asked] == ["draft", "draft", "auto", "auto", "draft", "auto"]
    learnt = [drafted.asked[at][1] for at in (0, 2)]
    assert [drafted.asked[at][1] for at in (1, 3, 4, 5)] == [first, first, second, second]
    assert all(prompt not in first + second for prompts in learnt for prompt in prompts)
