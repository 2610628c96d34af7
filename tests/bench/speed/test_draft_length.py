"""`draft-length`: results from run times, and validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.speed.draft_length import parsed, ratios, table
from tests.models import make

REPORT = {
    "target": "t",
    "draft": "d",
    "dtype": "float32",
    "temperature": 0.0,
    "prompts": 3,
    "tokens": 9,
    "seconds": {
        "specdec": {0: [1.0, 2.0, 4.0], 1: [0.5, 1.0, 1.0]},
        "transformers": {0: [2.0, 2.0, 2.0], 1: [4.0, 1.0, 2.0]},
    },
    "texts_that_differ": {"specdec": 0, "transformers": 1},
}


def test_a_ratio_is_within_a_prompt() -> None:
    assert ratios(REPORT, "specdec", 1) == [0.5, 0.5, 0.25]
    said = table(REPORT)
    assert "| specdec | 2.00 (1.00) | 1.00 (0.50) |" in said
    assert "| transformers | 2.00 (1.00) | 2.00 (1.00) |" in said
    assert "specdec 0, transformers 1" in said


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--most", "0", "--most is 0, must be at least 1"),
        ("--target", "nowhere", "--target: "),
        ("--draft", "foreign", "must have the demo's tokenizer"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("gpt2", tmp_path / "foreign")
    with pytest.raises(SystemExit):
        parsed([option, value if value.isdigit() else str(tmp_path / value)])
    assert what in capsys.readouterr().err
