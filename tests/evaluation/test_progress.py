"""The progress of an evaluation moves with every text."""

from __future__ import annotations

import pytest

from evaluation.progress import Progress
from specdec.progress import LINE_SECONDS


def test_without_a_terminal_there_are_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with Progress(200, clock=lambda: now[0]) as progress:
        for _ in range(8):
            now[0] += LINE_SECONDS / 4
            progress.heard(10)
        progress.not_needed(100)
        now[0] += LINE_SECONDS
        progress.heard(10)
        progress.not_needed(10)
        progress.not_needed(0)
    assert capsys.readouterr().err.splitlines() == [
        "specdec: evaluate: 200 tokens to generate",
        "specdec: evaluate: 20 %, about 40 s left",
        "specdec: evaluate: 40 %, about 30 s left",
        "specdec: evaluate: 90 %, about 3 s left",
        "specdec: evaluate: 100 %",
    ]
