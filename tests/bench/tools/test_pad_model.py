"""The command that pads models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tools.pad_model import main, parameter_count
from testing.padded_model import LABEL
from tests.models import make


def test_sizes_as_people_write_them() -> None:
    assert [parameter_count(text) for text in ("60M", "1.5B", "1000")] == [60_000_000, 1_500_000_000, 1000]


def test_it_writes_a_padded_copy_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make("llama", tmp_path / "source"), tmp_path / "padded"
    main(["--source", str(source), "--out", str(out), "--parameters", "0.5M"])
    assert ": padded from 0.1M to 0.5M" in capsys.readouterr().out
    assert LABEL in json.loads((out / "config.json").read_text())
    with pytest.raises(SystemExit, match="already padded"):
        main(["--source", str(out), "--out", str(tmp_path / "more"), "--parameters", "1M"])
