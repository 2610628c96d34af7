"""Prompts have the requested length and kind, and depend only on the seed."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from demo.prompts import KINDS, MIXED, TOKENIZER, held_out, of_kind


@pytest.mark.parametrize("kind", [*KINDS, MIXED])
@pytest.mark.parametrize("tokens", [32, 96])
def test_a_seed_gives_the_same_prompts(kind: str, tokens: int) -> None:
    first = of_kind(kind, 5, tokens, TOKENIZER, seed=1)
    assert [len(each) for each in first] == [tokens] * 5
    assert of_kind(kind, 5, tokens, TOKENIZER, seed=1) == first
    others = of_kind(kind, 5, tokens, TOKENIZER, seed=2)
    assert others != first


def test_kinds_are_what_they_say() -> None:
    decode = Tokenizer.from_file(str(TOKENIZER)).decode
    edited, asked = (decode(of_kind(kind, 1, 96, TOKENIZER)[0]) for kind in ("editing", "chat"))
    before, after = edited.split("renamed:\n")
    assert before.startswith("# Before:\n")
    assert "new_" in after
    assert asked.endswith(" do?\nA:")


def test_mixed_takes_turns() -> None:
    mixed = of_kind(MIXED, 8, 64, TOKENIZER)
    decode = Tokenizer.from_file(str(TOKENIZER)).decode
    chat = list(KINDS).index("chat")
    assert [decode(each).endswith("\nA:") for each in mixed] == [number % len(KINDS) == chat for number in range(8)]


def test_held_out_prompts_are_as_long_as_asked() -> None:
    first = held_out(5, tokens=40, seed=1)
    assert [len(each) for each in first] == [40] * 5
    assert held_out(5, tokens=40, seed=1) == first
    assert held_out(5, tokens=40, seed=2) != first
