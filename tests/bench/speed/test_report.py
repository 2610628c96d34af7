"""The speed benchmark's report on measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import CUT_OFF, publish
from bench.speed.measurements import ratios
from bench.speed.report import differences, plot, table
from bench.systems.specdec import PLAIN
from bench.systems.vllm_verifier import SERVED
from tests.bench.speed.reports import TWO_ROUNDS, measurement, report


def test_without_a_draft_there_is_no_step_of_it() -> None:
    times = {"step_times": [{"2/1": 0.001}]}
    assert "A step of the draft" not in table(report(*TWO_ROUNDS) | times)


def test_ratios_are_within_a_round() -> None:
    plain = [each for each in TWO_ROUNDS if each["configuration"] == PLAIN]
    drafted = [each for each in TWO_ROUNDS if each["configuration"] == "specdec drafted"]
    assert ratios(drafted, plain) == [1.5, 6.0]
    assert ratios(drafted, plain[:1]) == [1.5]


def test_the_table_tells_rates_standings_and_what_is_missing() -> None:
    said = table(report(*TWO_ROUNDS))
    assert "| specdec drafted | 225 (3.75) |" in said
    assert "| vLLM | 90 (1.40) |" in said
    assert "| vLLM | 2.12 (drafted over vLLM n-gram) |" in said  # the median of 150 / 120 and 300 / 100
    assert "| specdec plain | 200.0 | 10.0 | 10.0 | - | - | - | verifier 1.00, orchestrator 0.25 |" in said
    assert "| 0.75 | 1.50 |" in said  # columns: of ideal, cores
    assert "|  | 1 | 8 |\n|---|---|---|\n| threads: 2 | 1.0 | 2.0 |\n| threads: 1 | 3.0 | 4.0 |" in said
    assert "A step of the draft, one row: 0.50 ms." in said
    assert "Disturbed by other processes (more than 0.2 cores): 1 of 8." in said
    assert "Not measured: vllm none: too large" in said


def test_rates_are_divided_by_those_of_the_configuration_that_was_asked_for() -> None:
    said = table(report(*TWO_ROUNDS) | {"over": "vLLM"})
    assert "| vLLM n-gram | 110 (1.25) |" in said  # the median of 120 / 80 and 100 / 100
    assert "(over vLLM, within a round)" in said


def test_a_pause_that_is_rare_is_seen_in_the_last_percent() -> None:
    said = table(report(measurement("vLLM", 1.0, pauses=[0.01] * 90 + [0.5] * 10)))
    assert "| vLLM | 200.0 | 10.0 | 500.0 |" in said


def test_texts_are_compared_load_by_load() -> None:
    """Exact systems must agree; plain decoding with fast numerics may differ."""
    same = [measurement("specdec drafted", 1.0, text=7), measurement("specdec lookahead", 1.0, text=7)]
    fast = [measurement(PLAIN, 1.0, text=3), measurement(f"{PLAIN}, no CUDA graphs", 1.0, text=4)]
    assert differences(report(*fast, *same)).endswith("compared in 1 loads, different in 0.")
    other = [
        measurement("specdec drafted", 1.0, round=2, text=8),
        measurement("specdec lookahead", 1.0, round=2, text=9),
    ]
    assert differences(report(*same, *other)).endswith("compared in 2 loads, different in 1.")
    served = [measurement(SERVED, 1.0, text=4), measurement(f"{SERVED}, drafted", 1.0, text=4)]
    said = differences(report(*same, *served))  # another engine's texts differ
    assert f"Texts of {SERVED}, {SERVED}, drafted (the" in said
    assert said.count("compared in 1 loads, different in 0.") == 2


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    more = measurement("vLLM", 3.0, kind="mixed", streams=4)
    plot(report(*TWO_ROUNDS, more), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_without_measurements_has_no_plot(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ending:
        publish(report() | {CUT_OFF: True}, tmp_path, "speed", table, plot)
    assert ending.value.code == 130
    assert "Not measured: vllm none: too large" in (tmp_path / "speed.md").read_text()
    assert not (tmp_path / "speed.png").exists()


def test_what_is_cut_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By exit status 130 and one line in the output."""
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
