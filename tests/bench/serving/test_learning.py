"""The benchmark of learning drafts: its report on given texts, and a small complete run."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from bench.serving.learning import Plan, Text, Trainer, measured
from bench.serving.learning_report import WINDOW, pays_from, plot, summary, table
from specdec.local import DEMO


def texts(*speeds: float, guessed: int, phases: int = 1) -> list[Text]:
    """Return texts of ten tokens: a window of them for each speed, in tokens a second."""
    found, ended = list[Text](), 0.0
    for window, speed in enumerate(speeds):
        for _ in range(WINDOW):
            ended += 10 / speed
            phase = window * phases // len(speeds)
            found.append(Text(len(found), phase, ended, guessed, list(range(10)), [0.001] * 8 + [0.1]))
    return found


def report(plain: list[Text], learning: list[Text], **more: Any) -> dict[str, Any]:
    both = {"plain": plain, "learning": learning}
    runs = {name: summary(own) | {"versions": [], "different_texts": 0} for name, own in both.items()}
    kinds = ("code", "prose")[: len(runs["plain"]["phases"])]
    plan = {"target": "t", "draft": "d", "phases": kinds, "temperature": 0.8, "texts": 40, "tokens": 10, "streams": 1}
    return {"plan": plan, "runs": runs} | more


def test_a_run_is_summed_up_by_windows_and_phases() -> None:
    found = summary(texts(10, 20, 40, 40, guessed=3, phases=2))
    assert [window["tokens_per_second"] for window in found["windows"]] == pytest.approx([10, 20, 40, 40])
    assert [window["texts"] for window in found["windows"]] == [20, 40, 60, 80]
    assert {window["guessed"] for window in found["windows"]} == {0.3}
    first, second = found["phases"]
    assert first["tokens_per_second"] == pytest.approx(400 / 30)
    assert second["tokens_per_second"] == pytest.approx(40)
    assert first["gap_ms"]["p50"] == pytest.approx(1)
    assert first["gap_ms"]["p99"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("speeds", "seconds"),
    [((10, 20, 20), 30.0), ((20, 10, 20), 40.0), ((10, 20, 10), None), ((20, 20, 20), 10.0), ((10, 10, 10), None)],
)
def test_learning_pays_once_it_is_as_fast_until_the_phase_ends(
    speeds: tuple[float, ...], seconds: float | None
) -> None:
    found = report(texts(15, 15, 15, guessed=0), texts(*speeds, guessed=3))
    assert pays_from(found) == (None if seconds is None else pytest.approx(seconds))


def test_the_report_has_a_row_for_each_run_and_a_plot(tmp_path: Path) -> None:
    found = report(texts(15, 15, guessed=0, phases=2), texts(10, 20, guessed=3, phases=2))
    version = {"name": "1", "trained": 4.0, "decided": 9.0, "verdict": "promoted"}
    found["runs"]["learning"]["versions"] = [version]
    text = table(found)
    assert "| learning | 30% | 10 | 1, 100 | 30% | 20 | 1, 100 |" in text
    assert "Versions: 1: promoted at 9 s, trained at 4 s." in text
    pytest.importorskip("matplotlib")
    plot(found, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1000


class Broken(Trainer):
    """A trainer whose draft service does not answer."""

    began = Event()

    def _trained(self, base: Path, number: int) -> Path | None:
        self.began.set()
        raise ConnectionError("no service")


def test_an_error_of_the_training_ends_the_run(tmp_path: Path) -> None:
    plan = Plan(DEMO / "target", DEMO / "draft", texts=1, tokens=1, streams=1, steps=1, rate=1e-4, oracle_steps=1)
    trainer = Broken(plan, "nowhere:1", tmp_path, tmp_path / "key")
    with pytest.raises(ConnectionError, match="no service"), trainer.running():
        assert trainer.began.wait(60)


@pytest.mark.verify
def test_a_small_run_of_all_of_it(tmp_path: Path) -> None:
    """All runs give the same texts. Takes about five minutes."""
    plan = Plan(DEMO / "target", DEMO / "draft", texts=24, tokens=32, streams=2, steps=3, rate=1e-4, oracle_steps=5)
    found = measured(plan, tmp_path)
    assert list(found["runs"]) == ["plain", "fixed", "learning", "oracle"]
    for name, own in found["runs"].items():
        assert own["different_texts"] == 0, name
        assert len(own["phases"]) == 3
        assert any(phase["guessed"] for phase in own["phases"]) == (name != "plain")
    assert "Texts that differ from the plain run's: 0." in table(found)
