"""The progress of an evaluation moves with every text, and estimates the rest."""

from __future__ import annotations

import pytest

from evaluation.progress import LINE_SECONDS, Progress, left


@pytest.mark.parametrize(
    ("done", "total", "seconds", "told"),
    [
        (0, 100, 9.0, ""),
        (25, 100, 10.0, "about 30 s left"),
        (10, 100, 20.0, "about 3 min left"),
        (100, 100, 20.0, "about 0 s left"),
    ],
)
def test_the_rest_takes_as_long_as_what_is_done(done: int, total: int, seconds: float, told: str) -> None:
    assert left(done, total, seconds) == told


def test_without_a_terminal_there_are_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with Progress(200, clock=lambda: now[0]) as progress:
        for _ in range(8):
            now[0] += LINE_SECONDS / 4
            progress.heard(10)
        progress.not_needed(100)
        now[0] += LINE_SECONDS
        progress.heard(10)
    assert capsys.readouterr().err.splitlines() == [
        "specdec: evaluate: 200 tokens to generate",
        "specdec: evaluate: 20 %, about 60 s left",
        "specdec: evaluate: 40 %, about 45 s left",
        "specdec: evaluate: 90 %, about 5 s left",
    ]
