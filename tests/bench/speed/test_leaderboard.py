"""Several reports in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.speed import leaderboard
from bench.speed.leaderboard import lead
from bench.systems.specdec import PLAIN
from bench.systems.vllm_verifier import REMOTE, SERVED
from tests.bench.speed.reports import TWO_ROUNDS, measurement, report


def test_what_is_of_both_is_on_neither_side() -> None:
    of_both = [measurement(name, 1000.0) for name in (f"{SERVED}, drafted", REMOTE)]
    assert lead(report(*TWO_ROUNDS, *of_both), 0.0, 1) == lead(report(*TWO_ROUNDS), 0.0, 1)


def test_several_reports_stand_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates are relative to the best peer overall; a cell missing from a report stays empty."""
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
