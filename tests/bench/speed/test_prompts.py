"""Prompts of a comparison that come from sets of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.question_sets import PromptsError
from bench.speed.config import parsed
from bench.speed.prompts import QuestionPrompts, sets_of
from demo.prompts import MIXED
from specdec.local import DEMO

TARGET = DEMO / "target"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two sets: functions to continue, the last one long, and questions."""
    functions = [{"task_id": str(n), "prompt": f"def f{n}(x):\n" + "    pass\n" * (400 * (n == 3))} for n in range(4)]
    questions = [{"turns": [f"What is {n} plus {n}?", "Are you sure?"]} for n in range(5)]
    found = []
    for name, lines in (("functions", functions), ("questions", questions)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found.append(str(file))
    return found


def test_each_set_is_a_kind_and_mixed_takes_them_in_turn(files: list[str]) -> None:
    prompts = QuestionPrompts(sets_of(files), 64, TARGET)
    assert prompts.kinds == ["functions", "questions"]
    assert prompts.length == "at most 64 tokens"
    decode = AutoTokenizer.from_pretrained(TARGET).decode
    texts = [decode(prompt) for prompt in prompts.of(MIXED, 4, seed=1)]
    assert ["def f" in text for text in texts] == [True, False, True, False]
    assert ["plus" in text for text in texts] == [False, True, False, True]
    assert not any("sure" in text for text in texts)  # first turns alone


def test_prompts_depend_on_the_seed_and_long_ones_are_left_out(files: list[str]) -> None:
    prompts = QuestionPrompts(sets_of(files), 64, TARGET)
    drawn = {tuple(map(tuple, prompts.of("functions", 3, seed))) for seed in range(20)}
    assert len(drawn) > 1
    assert {len(set(order)) for order in drawn} == {3}  # none twice while others are left
    assert all(len(prompt) <= 64 for order in drawn for prompt in order)
    assert len(prompts.of("functions", 7, seed=0)) == 7


def test_a_set_without_short_prompts_is_refused(files: list[str]) -> None:
    with pytest.raises(PromptsError, match=r"questions: the shortest prompt has \d+ tokens, --prompt-tokens is 2"):
        QuestionPrompts(sets_of(files[1:]), 2, TARGET)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--prompts", "nowhere"], "--prompts: nowhere: is no file, and none of own, human-eval, mt-bench"),
        (["--prompts", "own", "--kinds", "code"], "--kinds and --prompts: give only one of them"),
    ],
)
def test_unusable_prompts_are_refused(given: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert problem in capsys.readouterr().err


def test_a_quick_run_takes_the_first_set(files: list[str]) -> None:
    config = parsed(["--prompts", *files, "--quick"])
    assert config.prompts.kinds == ["functions"]
    assert config.asked["prompts"] == "at most 96 tokens"
