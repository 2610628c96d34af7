"""The special tokens available to chat templates, determined as in transformers."""

from __future__ import annotations

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import Fields, read_fields

STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields of every tokenizer. The names of a model's own fields end in `_token` too."""

MAP_FILE = "special_tokens_map.json"
"""Read only if tokenizer_config.json has no `added_tokens_decoder`, as in older models; it then takes precedence."""

_END_OF_TEXT = "<|endoftext|>"

OF_CLASS = {
    "CodeLlamaTokenizer": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    "GPT2Tokenizer": {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {"eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT},
}
"""For each tokenizer class, the tokens for fields missing from all files. A null in a file means no token."""

OF_ARCHITECTURE = {
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}
"""`model_type` to tokenizer class, for files without `tokenizer_class`."""

CLASS_IGNORED = frozenset({"mistral", "qwen2"})
"""`model_type` of models with a wrong class in their published files; transformers ignores that class."""


def special_tokens(directory: ModelDirectory) -> dict[str, str]:
    """Return the special tokens of a model by name; ModelDirectoryError if one is neither a text nor an object with a
    text as `content`."""
    settings = Fields(directory.path / "tokenizer_config.json", directory.tokenizer_config)
    sources = [settings]
    if "added_tokens_decoder" not in settings.content and (older := read_fields(directory.path / MAP_FILE)) is not None:
        sources.append(older)
    found: dict[str, str | None] = dict(OF_CLASS.get(_class(directory), {}))
    for source in sources:
        found |= {field: None if source.content[field] is None else _text(source, field) for field in _fields(source)}
        if isinstance(source.content.get("extra_special_tokens"), dict):
            extra = source.fields("extra_special_tokens")
            found |= {field: _text(extra, field) for field in extra.content}
    return {field: text for field, text in found.items() if text is not None}


def _class(directory: ModelDirectory) -> str:
    """Return the class of the tokenizer, without the suffix `Fast`; empty if it is unknown."""
    named = directory.tokenizer_config.get("tokenizer_class")
    if not isinstance(named, str) or directory.model_type in CLASS_IGNORED:
        return OF_ARCHITECTURE.get(directory.model_type, "")
    return named.removesuffix("Fast")


def _fields(source: Fields) -> list[str]:
    """Return the names of fields that are special tokens; `add_bos_token`, for example, is not one."""
    return [field for field, value in source.content.items() if field in STANDARD or _is_own(field, value)]


def _is_own(field: str, value: object) -> bool:
    token = isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
    return field.endswith("_token") and token


def _text(source: Fields, field: str) -> str:
    if isinstance(source.content[field], dict):
        return source.fields(field).text("content")
    return source.text(field)
