"""Small tokenizers of published kinds, and model directories with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specdec.engine.model_directory import ModelDirectory
from specdec.text import tokenizer as text

SPECIAL = ("<pad>", "<s>", "</s>")


def byte_fallback(*, gemma: bool = False) -> Tokenizer:
    """Return a tokenizer that spells unknown characters in byte tokens, like Llama 2's; with `gemma`, it keeps a
    leading space, like Gemma's."""
    words = ["<unk>", "\u2581", *"abe.", "\u2581a", "\u2581the", "the", "\u00e9", "\ufffd"]
    names = [*SPECIAL, *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps if gemma else [*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken("<call>", special=False)])
    return made


def metaspace() -> Tokenizer:
    """Return a tokenizer without byte tokens, like T5's."""
    words = ["<unk>", "\u2581", *"abe.", "\u2581a", "\u2581the", "the"]
    made = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate([*SPECIAL, *words])}, merges=[]))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made


def byte_level() -> Tokenizer:
    """Return a tokenizer of single bytes in GPT-2's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made


def sentencepiece(words: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of words and letters, like SentencePiece's: it spells the rest in byte tokens, and begins
    texts with `<s>` and a space. `words` may contain spaces."""
    letters = map(chr, range(0x21, 0x7F))
    pieces = dict.fromkeys(["\u2581", *letters, *(word.replace(" ", "\u2581") for word in words)])
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scored = [(name, 0.0 if name.startswith("<") and len(name) > 1 else -10.0 + len(name)) for name in names]
    made = Tokenizer(models.Unigram(scored, unk_id=len(SPECIAL), byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def word_level() -> Tokenizer:
    """Return a tokenizer of words, with two special tokens and an added token that is not special."""
    names = ["<unk>", "<pad>", "<s>", "</s>", ".", "<tool>", "world", "hello", *(f"w{n}" for n in range(32))]
    made = Tokenizer(models.WordLevel(vocab={name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return made


def directory(tokenizer: Tokenizer, path: Path, **settings: object) -> ModelDirectory:
    """Write a model directory without weights, with this tokenizer."""
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    return ModelDirectory(path)


def loaded(tokenizer: Tokenizer, path: Path) -> text.Tokenizer:
    return text.Tokenizer(directory(tokenizer, path))
