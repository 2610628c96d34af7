"""lm-evaluation-harness: multiple choice, perplexity and generation on tasks made here."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tests.clients.checks.uses import WrongAnswerError, equal, said, server, use

SERVER = server()
FOLDER = Path(os.environ["HOME"]) / "tasks"
FOLDER.mkdir()
ROWS = [
    {"text": "def main():", "choices": ["\n    pass", "\n    zzzz"], "gold": 0},
    {"text": "import os\nimport", "choices": [" sys", " qqqq"], "gold": 0},
    {"text": "for number in", "choices": [" range(10):", " zebra(10):"], "gold": 0},
]
(FOLDER / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
DATASET: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "rows.json")}},
    "test_split": "test",
    "doc_to_text": "{{text}}",
}
TASKS: dict[str, dict[str, Any]] = {
    "choices_here": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity_here": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generation_here": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}
for name, task in TASKS.items():
    (FOLDER / f"{name}.yaml").write_text(json.dumps({"task": name, **DATASET, **task}))  # JSON is YAML


def results(task: str, model: str = "local-completions", route: str = "completions", *more: str) -> dict[str, Any]:
    """Return the metrics of a task."""
    where = f"model={SERVER.model},base_url={SERVER.base}/{route},tokenizer={SERVER.tokenizer},max_length=1024"
    options = ("--model", model, "--model_args", where, "--tasks", task, "--include_path", str(FOLDER))
    out = FOLDER / f"{task}-{model}"
    said("lm_eval", *options, "--output_path", str(out), *more)
    (file,) = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"][task]
    return found


@use("multiple choice")
def multiple_choice() -> None:
    """To any model of code, words of Python are likelier than nonsense."""
    equal(results("choices_here")["acc,none"], 1.0)


@use("perplexity")
def perplexity() -> None:
    found = results("perplexity_here")["word_perplexity,none"]
    if not math.isfinite(found) or found <= 1:
        raise WrongAnswerError(f"the perplexity is {found}")


@use("generation")
def generation() -> None:
    equal("exact_match,none" in results("generation_here"), True)


@use("generation, by chats")
def generation_by_chats() -> None:
    found = results("generation_here", "local-chat-completions", "chat/completions", "--apply_chat_template")
    equal("exact_match,none" in found, True)
