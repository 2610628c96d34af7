"""Added, special and end tokens, read from all files of a model directory as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind
from specdec.text.tokenizer import Tokenizer
from tests.text.tokenizers import directory, word_level

Files = dict[str, dict[str, Any]]

CONTENT = "<|turn|>"


def entry(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **usual, **flags}


SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

CASES: dict[str, Files] = {
    "nothing more": {},
    "by the tokenizer's configuration": {SETTINGS: {"added_tokens_decoder": {"40": entry(CONTENT)}}},
    "several, not in order": {
        SETTINGS: {
            "added_tokens_decoder": {"41": entry("<b>", special=False), "40": entry(CONTENT), "3": entry("</s>")}
        }
    },
    "other flags than tokenizer.json": {
        SETTINGS: {"added_tokens_decoder": {"3": entry("</s>"), "5": entry("<tool>", special=True)}}
    },
    "a plain word becomes special": {SETTINGS: {"added_tokens_decoder": {"7": entry("hello")}}},
    "empty": {SETTINGS: {"added_tokens_decoder": {}}, ADDED: {CONTENT: 40}},
    "by the older file": {ADDED: {CONTENT: 40, "<b>": 41}},
    "by the older file, special by its name": {ADDED: {CONTENT: 40}, SPECIAL: {"eos_token": CONTENT}},
    "by the older file, special among others": {
        ADDED: {CONTENT: 40, "<b>": 41},
        SETTINGS: {"additional_special_tokens": ["<b>"]},
    },
    "an id that is taken": {ADDED: {CONTENT: 3}},
    "a name alone": {SETTINGS: {"pad_token": "[PAD]"}},
    "a name alone, in the older file": {SPECIAL: {"pad_token": entry("[PAD]"), "eos_token": "</s>"}},
    "a name of the model's own": {SETTINGS: {"image_token": "<image>", "add_bos_token": False}},
    "names of the model's own": {SETTINGS: {"extra_special_tokens": {"image_token": "<image>"}}},
    "a name that is a word": {SETTINGS: {"unk_token": "hello"}},
    "without names": {SETTINGS: {"additional_special_tokens": ["<one>", "<two>", "</s>"]}},
    "without names, as they are called now": {SETTINGS: {"extra_special_tokens": ["<one>", "<two>"]}},
    "all of it": {
        SETTINGS: {
            "added_tokens_decoder": {"40": entry("<b>", special=False), "41": entry(CONTENT)},
            "additional_special_tokens": ["<c>", CONTENT],
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
        },
        ADDED: {"<not read>": 50},
        SPECIAL: {"sep_token": "<not read>"},
    },
}


def written(path: Path, files: Files) -> ModelDirectory:
    """Return a model directory with these fields in its files."""
    directory(word_level(), path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    for name, fields in (files | {SETTINGS: settings | files.get(SETTINGS, {})}).items():
        (path / name).write_text(json.dumps(fields))
    return ModelDirectory(path)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = written(tmp_path / "model", CASES[case])
    ours, theirs = Tokenizer(model), AutoTokenizer.from_pretrained(tmp_path / "model")
    assert isinstance(theirs, PreTrainedTokenizerFast)
    assert model.tokens == theirs.get_vocab()
    text = f"hello{CONTENT} world<b>[PAD]<one></s>hello<tool><image>[CLS]"
    tokens = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, special=False) == tokens
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    for token in range(len(theirs)):
        assert ours.is_spelt(token) == (theirs.decode([token], skip_special_tokens=True) != "")


def test_models_with_other_tokens_are_no_pair(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one", {}), written(tmp_path / "two", {ADDED: {CONTENT: 40}})
    with pytest.raises(
        ModelDirectoryError, match=r"the tokenizers of .* differ .*: the models cannot be used together"
    ):
        one.check_pair(two)
    one.check_pair(written(tmp_path / "three", {SETTINGS: {"added_tokens_decoder": {}}}))


def test_grammars_know_added_tokens(tmp_path: Path) -> None:
    """Text cannot be spelled with special tokens."""
    model = written(tmp_path / "model", {SETTINGS: {"added_tokens_decoder": {"7": entry("hello")}}})
    text = GrammarCompiler.of(model).compile(Grammar(Kind("regex"), ("hello",))).begin([], model.end_tokens)
    assert not text.permits([], 7)
    plain = written(tmp_path / "plain", {})
    assert (
        GrammarCompiler.of(plain).compile(Grammar(Kind("regex"), ("hello",))).begin([], plain.end_tokens).permits([], 7)
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {SETTINGS: {"added_tokens_decoder": {"x": entry("<b>")}}},
            "added_tokens_decoder.x is .*, must be keyed by an",
        ),
        ({SETTINGS: {"added_tokens_decoder": {"4": "<b>"}}}, 'added_tokens_decoder.4 is "<b>", must be an object'),
        ({SETTINGS: {"added_tokens_decoder": {"4": {}}}}, "added_tokens_decoder.4.content is missing"),
        ({SETTINGS: {"added_tokens_decoder": {"4": entry("b") | {"lstrip": 1}}}}, "lstrip is 1, must be true or false"),
        ({ADDED: {"<b>": "4"}}, '<b> is "4", must be an integer'),
        (
            {ADDED: {f"<{n}>": n for n in range(100_001)}},
            "added_tokens.json: has 100001 entries, must have at most 100000",
        ),
        ({SETTINGS: {"additional_special_tokens": [3]}}, r"additional_special_tokens\[0\] is 3, must be a string"),
        ({SETTINGS: {"eos_token": 3}}, "eos_token is 3, must be a string"),
    ],
)
def test_what_is_no_token_is_named(tmp_path: Path, files: Files, said: str) -> None:
    with pytest.raises(ModelDirectoryError, match=said):
        written(tmp_path / "model", files)


GENERATION, CONFIG = "generation_config.json", "config.json"

ENDS: dict[str, tuple[Files, set[int]]] = {
    "generation_config.json": ({GENERATION: {"eos_token_id": [4, 5]}, CONFIG: {"eos_token_id": 6}}, {4, 5}),
    "config.json": ({CONFIG: {"eos_token_id": 6}}, {6}),
    "beside the text part": ({CONFIG: {"eos_token_id": [6, 7], "text_config": {"eos_token_id": 8}}}, {6, 7}),
    "in the text part": ({CONFIG: {"eos_token_id": None, "text_config": {"eos_token_id": 8}}}, {8}),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    files, ends = ENDS[case]
    model = ends_of(tmp_path / "model", files)
    try:
        theirs = GenerationConfig.from_pretrained(model.path)
    except OSError:  # transformers, too, then reads config.json
        theirs = GenerationConfig.from_pretrained(model.path, config_file_name=CONFIG, _from_model_config=True)
    named = theirs.eos_token_id
    assert model.end_tokens == ends == set(named if isinstance(named, list) else [named])


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({GENERATION: {"temperature": 1.0}, CONFIG: {"eos_token_id": 6}}, {6}),
        ({CONFIG: {"eos_token_id": None}}, {3}),
        ({CONFIG: {"eos_token_id": None}, SETTINGS: {"eos_token": None}}, set()),
        ({CONFIG: {"eos_token_id": None}, SETTINGS: {"eos_token": "[beyond the model]"}}, set()),
    ],
)
def test_where_transformers_would_end_no_text_another_file_decides(
    tmp_path: Path, files: Files, ends: set[int]
) -> None:
    assert ends_of(tmp_path / "model", files).end_tokens == ends


def ends_of(path: Path, files: Files) -> ModelDirectory:
    directory(word_level(), path)
    for name, fields in files.items():
        before = json.loads((path / name).read_text()) if (path / name).exists() else {}
        if "text_config" in fields:
            fields = fields | {
                "text_config": {k: v for k, v in before.items() if k != "eos_token_id"} | fields["text_config"]
            }
        (path / name).write_text(json.dumps(before | fields))
    return ModelDirectory(path)
