"""Validation and defaults of the speed benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.speed.config import parsed
from bench.speed.speed import main
from tests.models import make


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--tokens", "0"], "--tokens is 0, must be at least 1"),
        (["--prompt-tokens", "8"], "--prompt-tokens is 8, must be at least 32"),
        (["--learning", "-1"], "--learning is -1, must be at least 0"),
        (["--patience", "nan"], "--patience is nan, must be at least 0"),
        (["--kinds", "poems"], "--kinds: poems is none of code, prose, editing, chat"),
        (["--streams", "0"], "--streams is 0, must be at least 1"),
        (["--streams", "two"], "argument --streams"),
        (["--temperatures", "-1"], "--temperatures is -1, must be at least 0"),
        (["--windows", "7,4"], "7,4 is no window: must be W,N,G, like 7,4,7"),
        (["--bad-drafts", "--draft", "none"], "--bad-drafts needs --draft"),
        (["--peers", "others"], "--peers: others is none of transformers, none"),
        (["--device", "meta", "--peers", "none"], "--device meta: cpu, cuda and cuda:N are supported"),
        (["--device", "cuda:99", "--peers", "none"], "--device cuda:99: t"),
        (["--threads", "0", "--peers", "none"], "--threads is 0, must be 1 to"),
        (["--threads", "1"], "--threads: of the other systems only vLLM supports it: add --peers none"),
        (["--target", "/nowhere"], "--target: "),
        (["--draft", "/nowhere"], "--draft: "),
    ],
)
def test_what_cannot_be_measured_is_refused(given: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert what in capsys.readouterr().err


def test_rates_are_divided_by_those_of_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peers", "none", "--over", "vLLM"])
    assert "--over: vLLM is none of specdec plain, specdec lookahead" in capsys.readouterr().err


def test_a_target_of_ones_own_has_no_draft_unless_given(tmp_path: Path) -> None:
    directory = str(make("llama", tmp_path / "own"))
    assert parsed(["--target", directory]).draft is None
    assert parsed([]).draft is not None
    assert parsed(["--draft", "none"]).draft is None
