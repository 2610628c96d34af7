"""Tokens become text piece by piece, and the pieces are exactly the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.text import Detokenizer, TextStream
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.text.tokenizer import Tokenizer
from tests.models import VOCABULARY, make

TOKENS = st.lists(st.integers(3, VOCABULARY - 1), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make("llama", tmp_path_factory.mktemp("model") / "m")
    return Tokenizer(ModelDirectory(directory))


def spell(stream: TextStream, tokens: list[int]) -> tuple[list[str], str]:
    """The pieces up to the end or the first stop string, and that stop string."""
    pieces = []
    for token in tokens:
        spelt = stream.push(token)
        pieces.append(spelt.text)
        if spelt.stop:
            return pieces, spelt.stop
    spelt = stream.finish()
    return [*pieces, spelt.text], spelt.stop


@given(prompt=TOKENS, tokens=TOKENS)
def test_the_pieces_join_to_the_whole(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> None:
    """After a prompt that ends in whole characters; else the text begins inside one."""
    text = tokenizer.decode(prompt)
    pieces, stop = spell(TextStream(tokenizer, prompt, ()), tokens)
    if not text.endswith("\ufffd"):
        assert text + "".join(pieces) == tokenizer.decode(prompt + tokens)
    assert stop == ""


@given(text=st.text(max_size=60))
def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, special=False)
    pieces, _ = spell(TextStream(tokenizer, [], ()), tokens)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab ", max_size=40),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_they_first_occur(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    tokens = tokenizer.encode(text, special=False)
    pieces, stop = spell(TextStream(tokenizer, [], stops), tokens)
    found = [(at, s) for s in stops if (at := text.find(s)) >= 0]
    if not found:
        assert ("".join(pieces), stop) == (text, "")
        return
    # The stop that is complete first, token by token, wins; its text goes from where it begins.
    assert stop
    cut = "".join(pieces)
    assert text.startswith(cut + stop)
    assert not any(s in cut for s in stops)
    # Nothing past the token that completes it was looked at.
    consumed = tokenizer.decode(tokens[: len(pieces)])
    before = tokenizer.decode(tokens[: len(pieces) - 1])
    assert any(s in consumed for s in stops)
    assert not any(s in before for s in stops)


@given(text=st.text(alphabet="ab \u00e9\U0001f600", max_size=30), data=st.data())
def test_a_replay_goes_on_where_it_broke_off(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    tokens = tokenizer.encode(text, special=False)
    cut = data.draw(st.integers(0, len(tokens)))
    stops = ("ba", "\u00e9a")
    whole, resumed = TextStream(tokenizer, [], stops), TextStream(tokenizer, [], stops)
    first = [whole.push(token) for token in tokens[:cut]]
    for token in tokens[:cut]:
        resumed.push(token)
    if any(spelt.stop for spelt in first):
        return
    assert spell(whole, tokens[cut:]) == spell(resumed, tokens[cut:])


def test_tokens_that_spell_nothing_are_not_kept() -> None:
    """Each cost as much as all before it: 2,000 special tokens took a tenth of a second."""
    directory = ModelDirectory(DEMO / "target")
    tokenizer = Tokenizer(directory)
    (end, *_) = directory.end_tokens
    words = tokenizer.encode("def main(x): return 1")
    detokenizer = Detokenizer(tokenizer, words[:2])
    assert {detokenizer.push(end) for _ in range(1000)} == {""}
    assert len(detokenizer._pending) < 10
    text = "".join(detokenizer.push(token) for token in words[2:]) + detokenizer.flush()
    assert text == tokenizer.decode(words)[len(tokenizer.decode(words[:2])) :]


@given(prompt=TOKENS, tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=20))
def test_one_special_token_may_be_spelt(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> None:
    """What stands between two of it is spelt as it is alone."""
    assume(not tokenizer.decode(prompt).endswith("\ufffd"))
    pieces, _ = spell(TextStream(tokenizer, prompt, (), shown=frozenset({0})), [0, *tokens])
    parts: list[list[int]] = [[]]
    for token in tokens:
        parts.append([]) if token == 0 else parts[-1].append(token)
    assert "".join(pieces) == "".join(
        "<pad>" + "".join(spell(TextStream(tokenizer, [], ()), part)[0]) for part in parts
    )
