"""What the speed benchmark makes of measurements, what it refuses, and how it asks a peer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from bench.report import CUT_OFF, publish
from bench.speed import leaderboard
from bench.speed.report import PLAIN, differences, plot, ratios, table
from bench.speed.speed import Cell, Comparison, arms, cells, parsed
from bench.speed.step_times import StepTimes
from bench.systems.system import Answer, Load, Peer, Subject, SubjectError
from tests.models import make


def measurement(arm: str, rate: float, **other: Any) -> dict[str, Any]:
    return {
        "arm": arm, "kind": "code", "streams": 1, "temperature": 0.0, "round": 1, "tokens_per_second": rate,
        "first": [0.1, 0.3], "pauses": [0.01] * 9, "tokens_per_step": None, "acceptance": None, "sources": {},
        "ideal": None, "cores": {"": 1.5}, "waiting_cores": 0.0, "foreign_cores": 0.0, "text": None, **other,
    }  # fmt: skip


def report(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m", "draft": None, "dtype": "float32", "prompt_tokens": 32, "tokens": 8, "rounds": 2,
        "temperatures": [0.0], "machine": {"cores": 2, "processor": "some"}, "peak_bytes": {"alone": {"a": 1 << 20}},
        "failed": {"vllm none": "too large"}, "measurements": list(measurements),
        "step_times": [{"2/1": 0.001, "2/8": 0.002, "1/1": 0.003, "1/8": 0.004, "draft": 0.0005}] * 2,
    }  # fmt: skip


TWO_ROUNDS = (
    measurement(PLAIN, 100.0, cores={"verifier": 1.0, "orchestrator": 0.25}, text=0),
    measurement("specdec drafted", 150.0, ideal=200.0, text=1),
    measurement("vLLM", 80.0),
    measurement("vLLM n-gram", 120.0),
    measurement(PLAIN, 50.0, round=2, cores={"verifier": 1.0, "orchestrator": 0.25}, text=2),
    measurement("specdec drafted", 300.0, round=2, ideal=400.0, foreign_cores=0.5, text=3),
    measurement("vLLM", 100.0, round=2),
    measurement("vLLM n-gram", 100.0, round=2),
)


def test_without_a_draft_there_is_no_step_of_it() -> None:
    times = {"step_times": [{"2/1": 0.001}]}
    assert "A step of the draft" not in table(report(*TWO_ROUNDS) | times)


def test_ratios_are_within_a_round() -> None:
    plain = [each for each in TWO_ROUNDS if each["arm"] == PLAIN]
    drafted = [each for each in TWO_ROUNDS if each["arm"] == "specdec drafted"]
    assert ratios(drafted, plain) == [1.5, 6.0]
    assert ratios(drafted, plain[:1]) == [1.5]


def test_the_table_tells_rates_standings_and_what_is_missing() -> None:
    said = table(report(*TWO_ROUNDS))
    assert "| specdec drafted | 225 (3.75) |" in said
    assert "| vLLM | 90 (1.40) |" in said
    assert "| vLLM | 2.12 (drafted over vLLM n-gram) |" in said  # 150 / 120 and 300 / 100
    assert "| specdec plain | 200.0 | 10.0 | 10.0 | - | - | - | verifier 1.00, orchestrator 0.25 |" in said
    assert "| 0.75 | 1.50 |" in said  # of ideal; cores
    assert "|  | 1 | 8 |\n|---|---|---|\n| threads: 2 | 1.0 | 2.0 |\n| threads: 1 | 3.0 | 4.0 |" in said
    assert "A step of the draft, one row: 0.50 ms." in said
    assert "Disturbed by processes of others (more than 0.2 cores): 1 of 8." in said
    assert "Not measured: vllm none: too large" in said


def test_several_reports_stand_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the best of all peers; a report that lacks a place leaves it out."""
    crowd = (measurement(PLAIN, 90.0, streams=16), measurement("llama.cpp", 180.0, streams=16))
    for name, more in (("one", crowd), ("two", ())):
        (tmp_path / name).mkdir()
        written = report(*TWO_ROUNDS, measurement("llama.cpp", 300.0), *more) | {"model": f"{name} (PADDED)"}
        (tmp_path / name / "speed.json").write_text(json.dumps(written))
    leaderboard.main([str(tmp_path / "one"), str(tmp_path / "two")])
    said = capsys.readouterr().out
    assert "|  | T = 0, 1 stream | T = 0, 16 streams |" in said
    assert "| one, float32 | 0.50 (drafted over llama.cpp) | 0.50 (plain over llama.cpp) |" in said
    assert "| two, float32 | 0.50 (drafted over llama.cpp) | - |" in said
    with pytest.raises(SystemExit):
        leaderboard.main([str(tmp_path)])
    assert "has no speed.json" in capsys.readouterr().err


def test_a_pause_that_is_rare_is_seen_in_the_last_percent() -> None:
    said = table(report(measurement("vLLM", 1.0, pauses=[0.01] * 90 + [0.5] * 10)))
    assert "| vLLM | 200.0 | 10.0 | 500.0 |" in said


def test_texts_are_compared_load_by_load() -> None:
    """Fast numerics, plain's, may differ; those of exact ones may not."""
    same = [measurement("specdec drafted", 1.0, text=7), measurement("specdec lookahead", 1.0, text=7)]
    assert differences(report(measurement(PLAIN, 1.0, text=3), *same)).endswith("compared in 1 loads, different in 0.")
    other = [
        measurement("specdec drafted", 1.0, round=2, text=8),
        measurement("specdec lookahead", 1.0, round=2, text=9),
    ]
    assert differences(report(*same, *other)).endswith("compared in 2 loads, different in 1.")


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    more = measurement("vLLM", 3.0, kind="mixed", streams=4)
    plot(report(*TWO_ROUNDS, more), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_one_stream_for_each_kind_and_many_of_all() -> None:
    args = parsed(["--streams", "1,4", "--kinds", "code,chat", "--temperatures", "0,1"])
    greedy = [Cell("code", 1, 0.0), Cell("chat", 1, 0.0), Cell("mixed", 4, 0.0)]
    assert cells(args) == [*greedy, Cell("code", 1, 1.0), Cell("chat", 1, 1.0), Cell("mixed", 4, 1.0)]


def test_only_what_runs_is_asked() -> None:
    assert list(arms(["alone", "guessing"])) == [PLAIN, "specdec lookahead"]
    assert "transformers assisted" in arms(["drafted", "generate"])
    assert list(arms(["generate"])) == ["transformers generate", "transformers prompt lookup"]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--tokens", "0"], "--tokens is 0, must be at least 1"),
        (["--prompt-tokens", "8"], "--prompt-tokens is 8, must be at least 32"),
        (["--learning", "-1"], "--learning is -1, must not be negative"),
        (["--patience", "nan"], "--patience is nan, must not be negative"),
        (["--kinds", "poems"], "--kinds: poems is none of code, prose, editing, chat"),
        (["--streams", "0"], "0 streams: must be at least 1"),
        (["--streams", "two"], "argument --streams"),
        (["--temperatures", "-1"], "temperature -1: must not be negative"),
        (["--peers", "others"], "--peers: others is none of transformers, none"),
        (["--target", "/nowhere"], "--target: "),
        (["--draft", "/nowhere"], "--draft: "),
    ],
)
def test_what_cannot_be_measured_is_refused(given: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert what in capsys.readouterr().err


def test_a_target_of_ones_own_has_no_draft_unless_given(tmp_path: Path) -> None:
    directory = str(make("llama", tmp_path / "own"))
    assert parsed(["--target", directory]).draft is None
    assert parsed([]).draft is not None
    assert parsed(["--draft", "none"]).draft is None


def test_an_answer_knows_its_latencies() -> None:
    answer = Answer(1.0, [[(0.25, 1), (0.5, 2)], [(0.125, 3)]])
    assert (answer.tokens, answer.first, answer.pauses) == (6, [0.25, 0.125], [0.25])


class TestGenerate:
    """transformers' `generate` as a peer, in a process of its own."""

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        folder = tmp_path_factory.mktemp("models")
        return [str(make("llama", folder / name)) for name in ("target", "draft")]

    def test_every_way_gives_the_same_text_in_its_own_steps(self, models: list[str]) -> None:
        options = ["--model", models[0], "--draft", models[1], "--dtype", "float32"]
        load = Load([[5, 6, 7, 8, 5, 6, 7, 8], [9, 8, 7]], 12, 0.0)
        with Peer.start("generate", sys.executable, "transformers_generate", options) as peer:
            plain = peer.run(load, "plain")
            assisted = peer.run(load, "assisted of 3")
            looked_up = peer.run(load, "prompt lookup")
            own = peer.run(load, "assisted")
            with pytest.raises(SubjectError, match="nonsense: no way to ask"):
                peer.run(load, "nonsense")
        assert plain.steps == plain.tokens == 24
        assert assisted.steps is not None
        assert assisted.steps < 24  # the draft is the target
        assert looked_up.tokens == own.tokens == 24
        for answer in (plain, assisted, looked_up, own):
            times = [when for stream in answer.arrivals for when, _ in stream]
            assert times == sorted(times)
            assert 0 < times[0] < times[-1] <= answer.seconds


class Broken:
    """A subject that fails when it is asked."""

    name = "broken"
    about: Mapping[str, Any] = MappingProxyType({})

    def run(self, load: Load, how: str = "") -> Answer:
        raise SubjectError("it is broken")

    def sessions(self) -> Mapping[str, int]:
        return {}


class Steady(Broken):
    """One that brings a token every hundredth of a second."""

    def run(self, load: Load, how: str = "") -> Answer:
        times = [(0.01 * (number + 1), 1) for number in range(load.max_tokens)]
        return Answer(0.01 * load.max_tokens, [times for _ in load.prompts], steps=load.max_tokens * len(load.prompts))


class NoSteps(StepTimes):
    def __init__(self) -> None:
        pass

    def measure(self) -> dict[str, float]:
        return {}


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    args = parsed(
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
    running: dict[str, Subject] = {"drafted": Broken(), "batching": Steady()}
    comparison = Comparison(args, running, NoSteps())
    comparison.run(Console(file=io.StringIO()))
    assert comparison.failed == {"specdec drafted": "1 streams of code: it is broken"}
    assert [(m.arm, m.streams, m.round) for m in comparison.measurements] == [
        ("transformers batching", streams, number) for number in (1, 2) for streams in (1, 2)
    ]
    assert [round(m.tokens_per_second) for m in comparison.measurements] == [100, 200, 100, 200]


class Counting(Steady):
    """It notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[list[int]]]] = []

    def run(self, load: Load, how: str = "") -> Answer:
        self.asked.append((how, load.prompts))
        return super().run(load, how)


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
    Comparison(parsed(options), {"alone": plain, "drafted": drafted}, NoSteps()).run(Console(file=io.StringIO()))
    first, second = (prompts for _, prompts in plain.asked)
    assert [how for how, _ in drafted.asked] == ["draft", "draft", "auto", "auto", "draft", "auto"]
    learnt = [drafted.asked[at][1] for at in (0, 2)]
    assert [drafted.asked[at][1] for at in (1, 3, 4, 5)] == [first, first, second, second]
    assert all(prompt not in first + second for prompts in learnt for prompt in prompts)


def test_what_is_cut_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit status 130, and in one line that says so."""
    cut = report(
        measurement(PLAIN, 100.0), measurement("specdec drafted", 150.0), measurement(PLAIN, 50.0, kind="chat")
    )
    with pytest.raises(SystemExit) as ending:
        publish(cut | {CUT_OFF: True}, tmp_path, "speed", table, plot)
    assert ending.value.code == 130
    assert json.loads((tmp_path / "speed.json").read_text())["measurements"] == cut["measurements"]
    for text in (capsys.readouterr().out, (tmp_path / "speed.md").read_text()):
        assert text.startswith("CUT OFF: ")
        assert "| specdec drafted | 150 (1.50) | - |" in text
        assert "interleaved rounds: 1, medians" in text
