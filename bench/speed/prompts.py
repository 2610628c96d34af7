"""The prompts of a comparison: of the demo's kinds, all of the same length, or from sets of questions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

from bench.question_sets import PromptsError, Question, read_all
from demo.prompts import MIXED, of_kind


class Prompts(Protocol):
    """A source of prompts as token ids, of several kinds."""

    @property
    def kinds(self) -> Sequence[str]: ...

    @property
    def length(self) -> str:
        """The length of the prompts, for a report: "96 tokens"."""
        ...

    def of(self, kind: str, count: int, seed: int) -> list[list[int]]:
        """Return prompts of a kind, or of all kinds in turn for MIXED."""
        ...


class DemoPrompts:
    """Prompts of `tokens` tokens from text that the demo pair has not seen."""

    def __init__(self, kinds: Sequence[str], tokens: int, target: Path) -> None:
        self.kinds = kinds
        self.length = f"{tokens} tokens"
        self._tokens = tokens
        self._tokenizer = target / "tokenizer.json"

    def of(self, kind: str, count: int, seed: int) -> list[list[int]]:
        return of_kind(kind, count, self._tokens, self._tokenizer, seed)


class QuestionPrompts:
    """The first turns of questions, as messages if the target has a chat template and the text is not to be continued.
    A set of questions is a kind."""

    def __init__(self, sets: Mapping[str, Sequence[Question]], most: int, target: Path) -> None:
        """Leave out prompts of more than `most` tokens; PromptsError if a set has no shorter one."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
        self.kinds = list(sets)
        self.length = f"at most {most} tokens"
        self._prompts: dict[str, list[list[int]]] = {}
        for name, questions in sets.items():
            encoded = [_encoded(tokenizer, question) for question in questions]
            self._prompts[name] = [prompt for prompt in encoded if len(prompt) <= most]
            if not self._prompts[name]:
                shortest = min(map(len, encoded))
                raise PromptsError(f"{name}: the shortest prompt has {shortest} tokens, --prompt-tokens is {most}")

    def of(self, kind: str, count: int, seed: int) -> list[list[int]]:
        generator = random.Random(f"{kind} {seed}")
        kinds = self.kinds if kind == MIXED else [kind]
        shuffled = {name: cycle(generator.sample(self._prompts[name], len(self._prompts[name]))) for name in kinds}
        return [next(shuffled[name]) for name in islice(cycle(kinds), count)]


def sets_of(names: Sequence[str]) -> dict[str, list[Question]]:
    """Return the questions of these names and files, as `bench papers` reads them, by set; PromptsError as there."""
    found: dict[str, list[Question]] = {}
    for question in read_all(names):
        found.setdefault(question.id.partition("/")[0], []).append(question)
    return found


def _encoded(tokenizer: Any, question: Question) -> list[int]:
    text = question.turns[0]
    if question.continued or tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(rendered, add_special_tokens=False))
