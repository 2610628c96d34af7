"""Tokens become text piece by piece; the pieces join to exactly the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from orchestrator.text.sample_text import Detokenizer, TextStream
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.models import VOCABULARY, make
from tests.models import tokenizer as byte_level
from tests.text.tokenizers import SPECIAL, byte_fallback, loaded, metaspace

TOKENS = st.lists(st.integers(3, VOCABULARY - 1), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make("llama", tmp_path_factory.mktemp("model") / "m")
    return Tokenizer(ModelDirectory(directory))


def spell(stream: TextStream, tokens: list[int]) -> tuple[list[str], str]:
    """Return the pieces up to the end or the first stop string, and that stop string."""
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
    """After a prompt that ends with a whole character; otherwise the text starts inside one."""
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


@settings(max_examples=examples(150))
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
    # The stop string completed first, token by token, wins; the text is cut where it starts.
    assert stop
    cut = "".join(pieces)
    assert text.startswith(cut + stop)
    assert not any(s in cut for s in stops)
    # Nothing past the token completing it was examined.
    consumed = tokenizer.decode(tokens[: len(pieces)])
    before = tokenizer.decode(tokens[: len(pieces) - 1])
    assert any(s in consumed for s in stops)
    assert not any(s in before for s in stops)


@settings(max_examples=examples(150))
@given(
    text=st.text(alphabet="ab ", max_size=20),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 12),
)
def test_stop_strings_end_after_the_minimum_of_tokens(
    tokenizer: Tokenizer, text: str, stops: list[str], least: int
) -> None:
    """They may begin before, as in vLLM."""
    tokens = tokenizer.encode(text, special=False)
    assume(len(tokens) == len(text))
    wanted = (text, "")
    for count in range(least + 1, len(text) + 1):
        places = [(text.find(stop, max(0, least - len(stop) + 1), count), stop) for stop in stops]
        if found := [(at, -len(stop), stop) for at, stop in places if at >= 0]:
            at, _, stop = min(found)
            wanted = (text[:at], stop)
            break
    pieces, stop = spell(TextStream(tokenizer, [], stops, min_tokens=least), tokens)
    assert ("".join(pieces), stop) == wanted


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
    """Otherwise the cost would be quadratic: 2,000 special tokens took 0.1 s."""
    directory = ModelDirectory(DEMO / "target")
    tokenizer = Tokenizer(directory)
    (end, *_) = directory.end_tokens
    words = tokenizer.encode("def main(x): return 1")
    detokenizer = Detokenizer(tokenizer, words[:2])
    assert {detokenizer.push(end) for _ in range(1000)} == {""}
    assert not detokenizer._pending
    text = "".join(detokenizer.push(token) for token in words[2:]) + detokenizer.flush()
    assert text == tokenizer.decode(words)[len(tokenizer.decode(words[:2])) :]


@given(prompt=TOKENS, tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=20))
def test_one_special_token_may_be_spelt(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> None:
    """Text between two occurrences is the same as without them."""
    assume(not tokenizer.decode(prompt).endswith("\ufffd"))
    pieces, _ = spell(TextStream(tokenizer, prompt, (), shown=frozenset({0})), [0, *tokens])
    parts: list[list[int]] = [[]]
    for token in tokens:
        parts.append([]) if token == 0 else parts[-1].append(token)
    assert "".join(pieces) == "".join(
        "<pad>" + "".join(spell(TextStream(tokenizer, [], ()), part)[0]) for part in parts
    )


# --- every kind of tokenizer ----------------------------------------------------------------------------

KINDS = ("byte level", "byte fallback", "byte fallback, no strip", "metaspace")
MADE = dict(zip(KINDS, (byte_level(), byte_fallback(), byte_fallback(gemma=True), metaspace()), strict=True))
PUBLISHED = {kind: PreTrainedTokenizerFast(tokenizer_object=made) for kind, made in MADE.items()}
BYTES_FROM = len(SPECIAL) + 11
"""Id of the first byte token with byte fallback."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: loaded(MADE[kind], root / kind) for kind in KINDS}


@cache  # a new strategy is validated when it is first drawn from
def ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, including special and unknown ones; many from multi-byte characters, whole and cut."""
    whole = st.sampled_from(
        [tokenizer.encode(text, special=False) for text in ("\u20ac", "\U0001f600", "\u00e9", " a")]
    )
    cut = st.tuples(whole, st.integers(1, 3)).map(lambda pair: pair[0][: pair[1]])
    some = st.lists(st.integers(0, tokenizer.size), max_size=3)
    return st.lists(st.one_of(some, whole, cut), max_size=12).map(lambda parts: [id for part in parts for id in part])


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), special=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_what_transformers_decodes(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject, special: bool
) -> None:
    """At every cut, the text so far is a prefix of the whole, and the rest completes it; with `special` tokens too."""
    tokenizer = kinds[kind]
    tokens = data.draw(ids(tokenizer))
    detokenizer, told = Detokenizer(tokenizer, [], special=special), ""
    for count, token in enumerate(tokens, 1):
        told += detokenizer.push(token)
        assert told + copy(detokenizer).flush() == tokenizer.decode(tokens[:count], special=special)
    assert told + detokenizer.flush() == PUBLISHED[kind].decode(tokens, skip_special_tokens=not special)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_behind_its_prompt(kinds: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = kinds[kind]
    prompt, tokens = data.draw(ids(tokenizer)), data.draw(ids(tokenizer))
    prompt = [*tokenizer.encode(data.draw(st.sampled_from(["a", "\u20ac"])), special=False), *prompt]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
    assume(before and not before.endswith("\ufffd"))  # otherwise the prompt may end inside a character
    assume(whole.startswith(before))  # otherwise a run of bytes that the prompt has begun is cut
    assert before + "".join(spell(TextStream(tokenizer, prompt, ()), tokens)[0]) == whole


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS[:3])
def test_no_character_is_replaced_that_a_later_token_completes(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """With any continuation, the text so far is a prefix of the final one."""
    tokenizer = kinds[kind]
    tokens, further = data.draw(ids(tokenizer)), data.draw(ids(tokenizer))
    detokenizer = Detokenizer(tokenizer, [])
    told = "".join(detokenizer.push(token) for token in tokens)
    assert tokenizer.decode(tokens + further).startswith(told)


def test_a_prompt_may_end_inside_a_character(kinds: dict[str, Tokenizer]) -> None:
    for kind in KINDS[:3]:
        tokenizer = kinds[kind]
        tokens = tokenizer.encode("a\u20ac\u20acb", special=False)
        cut = next(at for at in range(len(tokens)) if tokenizer.decode(tokens[:at]).count("\u20ac") == 1) + 1
        pieces, _ = spell(TextStream(tokenizer, tokens[:cut], ()), tokens[cut:])
        assert "".join(pieces) == "\u20acb"


def test_a_cut_character_reads_as_transformers_reads_it(kinds: dict[str, Tokenizer]) -> None:
    """With byte fallback, each byte of an invalid run is replaced, and the run gives no text before its end."""
    tokenizer = kinds["byte fallback"]
    euro = [BYTES_FROM + byte for byte in "\u20ac".encode()]
    pieces, _ = spell(TextStream(tokenizer, tokenizer.encode("a", special=False), ()), [*euro, *euro[:1]])
    assert pieces == ["", "", "", "", "\ufffd" * 4]
    pieces, _ = spell(TextStream(tokenizer, tokenizer.encode("a", special=False), ()), [*euro, *euro])
    assert "".join(pieces) == "\u20ac\u20ac"


def test_a_long_run_of_bytes_costs_no_more_than_its_length(kinds: dict[str, Tokenizer]) -> None:
    """A run of byte tokens is decoded once, at its end."""
    tokenizer = kinds["byte fallback"]
    decoded: list[int] = []

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
            decoded.append(len(tokens))
            return tokenizer.decode(tokens, special=special)

    counting = object.__new__(Counting)
    counting.__dict__ = tokenizer.__dict__
    run = tokenizer.encode("\u20ac" * 1000, special=False)
    pieces, _ = spell(TextStream(counting, [], ()), [*run, *tokenizer.encode("a", special=False)])
    assert "".join(pieces).strip() == "\u20ac" * 1000 + "a"
    assert sum(decoded) < 2 * len(run)


# --- stop strings and special tokens --------------------------------------------------------------------

SHOWN = "ab "
PAD = "<pad>"


def expected(parts: list[str], stops: list[str]) -> tuple[str, str]:
    """Return the text up to the first stop string, and that string, by definition. Parts are characters or PAD."""
    for count in range(len(parts) + 1):
        visible = "".join(part for part in parts[:count] if part != PAD)
        raw = "".join(parts[:count])
        found = [(at, stop) for stop in stops if (at := visible.find(stop)) >= 0]
        found += [
            (len(raw[:at].replace(PAD, "")), stop) for stop in stops if PAD in stop and (at := raw.find(stop)) >= 0
        ]
        if found:
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            return visible[:at], stop
    return "".join(part for part in parts if part != PAD), ""


@settings(max_examples=examples(250), deadline=None)
@given(
    parts=st.lists(st.sampled_from([*SHOWN, PAD]), max_size=20),
    stops=st.lists(st.lists(st.sampled_from([*SHOWN, PAD]), min_size=1, max_size=4).map("".join), max_size=3),
)
def test_stop_strings_with_special_tokens_are_found_where_they_stand(
    tokenizer: Tokenizer, parts: list[str], stops: list[str]
) -> None:
    tokens = [token for part in parts for token in tokenizer.encode(part, special=False)]
    assume(len(tokens) == len(parts))
    pieces, stop = spell(TextStream(tokenizer, [], stops), tokens)
    assert ("".join(pieces), stop) == expected(parts, stops)


def test_hidden_text_that_no_stop_string_can_reach_is_not_kept(tokenizer: Tokenizer) -> None:
    """It would be joined and searched with each further token."""
    (a,), pad = tokenizer.encode("a", special=False), tokenizer.special_token(PAD)
    assert pad is not None
    stream = TextStream(tokenizer, [], ["ab", f"{PAD}b"])
    for token in [a, *[pad] * 2000]:
        assert stream.push(token).text == ""
    assert len(stream._stop._spelt) < 100
    assert stream.finish().text == "a"


def test_special_tokens_before_the_minimum_of_tokens_complete_no_stop_string(tokenizer: Tokenizer) -> None:
    (a,), pad = tokenizer.encode("a", special=False), tokenizer.special_token(PAD)
    assert pad is not None
    stream = TextStream(tokenizer, [], [f"a{PAD}"], min_tokens=2)
    assert spell(stream, [a, pad, a, pad, a])[1] == f"a{PAD}"
    pieces, stop = spell(TextStream(tokenizer, [], [f"a{PAD}"], min_tokens=4), [a, pad, a, pad, a])
    assert ("".join(pieces), stop) == ("aaa", "")


def test_the_end_token_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    (a, newline), end = tokenizer.encode("a\n", special=False), tokenizer.special_token("</s>")
    assert end is not None
    stream = TextStream(tokenizer, [], ["\n</s>"])
    assert [stream.push(a).text, stream.push(newline).text] == ["a", ""]
    assert (stream.end(end).stop, stream.finish().text) == ("\n</s>", "")
    other = TextStream(tokenizer, [], ["b</s>"])
    assert [other.push(a).text, other.push(newline).text, other.end(end).stop] == ["a", "\n", ""]
