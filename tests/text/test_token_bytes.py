"""The bytes of a token are those of the text that the library's decoder makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind
from tests.text.tokenizers import byte_fallback, byte_level, directory, loaded, metaspace

SPACES = "\u2581\u2581"
"""Gemma 2 has such runs as added tokens that are not special."""

ADDED = (SPACES, "a\u2581b", "\n\n", "\u00e9", "\u0120", "\u00ff<x>", "\u65e5\u672c", "<0x0A>")

TOKENIZERS = {
    "Llama 2": byte_fallback(),
    "Gemma 2": byte_fallback(gemma=True),
    "T5": metaspace(),
    "GPT-2": byte_level(),
}
for tokenizer in TOKENIZERS.values():
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_a_token_are_those_of_its_text(name: str, tmp_path: Path) -> None:
    tokenizer = loaded(TOKENIZERS[name], tmp_path / "model")
    (before,) = TOKENIZERS[name].encode("a", add_special_tokens=False).ids
    tokens = [token for token in range(tokenizer.size) if token not in tokenizer.special_tokens]
    spelt = {token: tokenizer.decode([before, token])[1:] for token in tokens}
    assert {token: tokenizer.piece(token).decode(errors="replace") for token in tokens} == spelt


@pytest.mark.parametrize(("expression", "taken"), [("a\\S+c", False), ("a *c", True)])
def test_a_grammar_reads_an_added_token_as_its_text(expression: str, taken: bool, tmp_path: Path) -> None:
    library: FastTokenizer = TOKENIZERS["Gemma 2"]
    compiler = GrammarCompiler.of(directory(library, tmp_path / "model"))
    text = compiler.compile(Grammar(Kind.REGEX, (expression,))).begin([], frozenset({2}))
    text.commit(library.encode("a", add_special_tokens=False).ids)
    mask = text.allowed([])
    assert mask is not None
    assert np.unpackbits(mask, bitorder="little")[library.token_to_id(SPACES)] == taken
