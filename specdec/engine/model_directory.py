"""A model directory in Hugging Face's layout, read without torch: configuration and identity."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.engine.added_tokens import MAX_TOKEN_ID, TokenizerFiles
from specdec.engine.model_file import (
    Fields,
    ModelDirectoryError,
    add_sample,
    is_integer,
    opened,
    read_fields,
    shown,
    unreadable,
)

GRAPH = "model.onnx"
COPY_GRAPH = "copy.onnx"
SHORTLISTS_GRAPH = "shortlists.onnx"
DESCRIPTION = "specdec.json"
"""Files of an exported model besides its configuration and tokenizer: GRAPH, COPY_GRAPH, SHORTLISTS_GRAPH (which
exports of earlier versions lack), DESCRIPTION."""

COMPLETE = "COMPLETE"
"""File whose presence, whatever its contents, marks a draft's version in a folder of versions as complete."""

WEIGHTS = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model" + INDEX_SUFFIX
"""Weight files: a single file, or an index that maps tensors to files."""

WEIGHTS_FIELD = "transformers_weights"
"""Field of config.json that names another weight file or index."""

MIN_CONTEXT = 64
"""Minimum context of a model in tokens, since checks and measurements at start use texts of about thirty tokens."""

MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 30
"""Maximum number of token ids, and maximum context in tokens. Both far exceed those of every known model, and fit into
the 32 bits used for token ids and positions."""

ORIGINAL_CONTEXT = "original_max_position_embeddings"
"""Field of rotary embeddings with the context before they were scaled, in tokens."""

MAX_END_TOKENS = 1000
"""Maximum number of a model's end tokens, since every request carries them."""


GIVE_GGUF = "give the GGUF file itself, or convert it with `specdec import-gguf`"

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Form of a model's name on Hugging Face's hub: owner and name."""

LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
}
"""transformers' defaults for fields that are missing from the `text_config` of published multimodal models, by
`model_type`."""


@dataclass(frozen=True)
class ModelDirectory:
    """A model's directory: everything that can be known about the model without loading it.

    The constructor reads and checks everything except the weights, so that a broken directory fails a service's start
    and not its requests. The weights are opened on demand.
    """

    path: Path

    def __post_init__(self) -> None:
        self._check_configuration()
        _ = self.tokenizer_fingerprint, self.end_tokens

    def _check_configuration(self) -> None:
        """Read and check everything except the tokenizer."""
        try:
            is_directory = stat.S_ISDIR(self.path.stat().st_mode)
        except FileNotFoundError:
            raise ModelDirectoryError(f"{self.path}: {_missing(self.path)}") from None
        except OSError as error:
            raise unreadable(self.path, error) from error
        if not is_directory:
            raise ModelDirectoryError(f"{self.path}: is a file, not the directory of a model: {_instead_of(self.path)}")
        _ = self.name, self.vocabulary, self.context, self._named_end_tokens
        text = self._text_config
        for config in (text, self._whole_config):
            for key in ("quantization_config", "rope_parameters", "rope_scaling"):  # read by `hf/pretrained.py`
                if config.has(key):
                    config.fields(key)
        if text.has("sliding_window"):
            text.integer("sliding_window", 0, MAX_CONTEXT)

    def _needed(self, name: str) -> Fields:
        """Read a file required of every model."""
        found = read_fields(self.path / name)
        if found is None:
            raise ModelDirectoryError(f"{self.path}: no {name}{self._of_gguf()}")
        return found

    def _of_gguf(self) -> str:
        """Return the end of an error message about a directory that contains a GGUF model."""
        with contextlib.suppress(OSError):
            for file in sorted(self.path.glob("*.gguf")):
                return f", but {file.name}: {GIVE_GGUF}"
        return ""

    def _optional(self, name: str) -> Fields:
        """Read an optional file; a missing one has no fields."""
        file = self.path / name
        return read_fields(file) or Fields(file, {})

    @cached_property
    def _whole_config(self) -> Fields:
        return self._needed("config.json")

    @cached_property
    def _text_config(self) -> Fields:
        whole = self._whole_config
        if not whole.has("text_config"):
            return whole
        text = whole.fields("text_config")
        return replace(text, content=LEFT_OUT.get(str(whole.content.get("model_type")), {}) | text.content)

    @property
    def model_type(self) -> str:
        """The architecture, by transformers' name."""
        return self._whole_config.text("model_type")

    @property
    def config(self) -> dict[str, Any]:
        """The fields of config.json; for a multimodal model, those of its text part."""
        return self._text_config.content

    @property
    def whole_config(self) -> dict[str, Any]:
        """The fields of config.json, including those outside the text part of a multimodal model."""
        return self._whole_config.content

    @property
    def quantisation(self) -> dict[str, Any] | None:
        """The field `quantization_config`, which in multimodal models is outside the text part; None if the weights are
        not quantised."""
        sources = (self._text_config.content, self._whole_config.content)
        return next((source["quantization_config"] for source in sources if source.get("quantization_config")), None)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._optional("tokenizer_config.json").content

    @cached_property
    def generation_config(self) -> Fields:
        """The fields of generation_config.json, which few models lack."""
        return self._optional("generation_config.json")

    @cached_property
    def name(self) -> str:
        """The served name of the model: the last part of its path. A symbolic link is not resolved, because its target
        may be named after a hash."""
        name = os.path.basename(os.path.abspath(self.path))
        try:
            name.encode()  # it is sent in messages
        except UnicodeEncodeError as error:
            raise ModelDirectoryError(f"{self.path}: the directory's name is not UTF-8") from error
        return name

    @cached_property
    def vocabulary(self) -> int:
        """The width of the logits, padding included."""
        return self._text_config.integer("vocab_size", 2, MAX_VOCABULARY)

    @property
    def dtype(self) -> object:
        """The dtype of the weights in config.json (`torch_dtype` in older files); None if it has none."""
        sources = (self._text_config.content, self._whole_config.content)
        return next((source[key] for source in sources for key in ("dtype", "torch_dtype") if source.get(key)), None)

    @cached_property
    def context(self) -> int:
        """Length of the longest text supported by the model, in tokens. YaRN's context counts if it is longer than
        max_position_embeddings, because model cards advise adding YaRN without changing that field."""
        config = self._text_config
        for key in ("max_position_embeddings", "n_positions"):
            if config.has(key):
                return max(config.integer(key, MIN_CONTEXT, MAX_CONTEXT), _context_by_yarn(config))
        raise ModelDirectoryError(
            f"{config.file}: names no context length: neither max_position_embeddings nor n_positions"
        )

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a text (docs/text.md). If no file names any, the tokenizer's own end token is used, since a text
        must be able to end."""
        if self._named_end_tokens:
            return self._named_end_tokens
        text = self.tokenizer_files.end_token
        found = None if text is None else self.tokens.get(text)
        return frozenset() if found is None or found >= self.vocabulary else frozenset({found})

    @cached_property
    def _named_end_tokens(self) -> frozenset[int]:
        """End tokens of generation_config.json, else of config.json (top level before text part). Only the first source
        with end tokens is used, because corrected end tokens are published in generation_config.json alone."""
        for source in (self.generation_config, self._whole_config, self._text_config):
            if source.has("eos_token_id"):
                return frozenset(source.integers("eos_token_id", 0, self.vocabulary - 1, count=MAX_END_TOKENS))
        return frozenset()

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles:
        """The files that define the tokens; tokenizer.json is reduced to the fields that list tokens."""
        settings = Fields(self.path / "tokenizer_config.json", self.tokenizer_config)
        special, added = (self._optional(name) for name in ("special_tokens_map.json", "added_tokens.json"))
        return TokenizerFiles(_listing_tokens(self._needed("tokenizer.json")), settings, special, added)

    @cached_property
    def tokens(self) -> dict[str, int]:
        """The ids of all tokens by their texts."""
        tokenizer = self.tokenizer_files.tokenizer
        pieces = _pieces(tokenizer)
        if not (pieces or tokenizer.content.get("added_tokens")):
            raise ModelDirectoryError(f"{tokenizer.file}: model.vocab has no tokens")
        return self.tokenizer_files.ids(pieces)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256, in hex, of the mapping from ids to texts, independent of the format of the files."""
        meaning = sorted((number, token) for token, number in self.tokens.items())
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()

    def check_pair(self, other: ModelDirectory) -> None:
        """Raise ModelDirectoryError unless the two tokenizers are the same, so that one model can draft for the
        other."""
        if self.tokenizer_fingerprint != other.tokenizer_fingerprint:
            raise ModelDirectoryError(
                f"the tokenizers of {other.path} and {self.path} differ ({self._difference(other)}): the models "
                "cannot be used together"
            )

    def _difference(self, other: ModelDirectory) -> str:
        """Describe how two models' tokenizers differ: their sizes, and the first id with different texts."""
        mine, others = ({number: token for token, number in directory.tokens.items()} for directory in (self, other))
        first = min(number for number in mine.keys() | others.keys() if mine.get(number) != others.get(number))
        one, two = (shown(texts[first]) if first in texts else "nothing" for texts in (others, mine))
        return f"{len(others)} and {len(mine)} tokens; id {first} is {one} and {two}"

    def weights(self) -> list[Path]:
        """Return the weight files; ModelDirectoryError unless all of them can be read."""
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            raise unreadable(self.path, error) from error
        graphs = [self.path / name for name in names if ".onnx" in name]
        _, safetensors = self._safetensors(names)
        files = sorted([*safetensors, *graphs])
        for file in files:
            with opened(file):
                pass
        return files

    @property
    def names_weights(self) -> bool:
        """True if the model's safetensors have transformers' standard names, or config.json names them."""
        return self._whole_config.has(WEIGHTS_FIELD) or any((self.path / name).exists() for name in (WEIGHTS, INDEX))

    def safetensors(self) -> tuple[Path | None, list[Path]]:
        """Return the index of the model's safetensors, if any, and the files themselves."""
        return self._safetensors(sorted(os.listdir(self.path)))

    def _safetensors(self, names: list[str]) -> tuple[Path | None, list[Path]]:
        """Return the index, if any, and the safetensors that belong to the model, by transformers' rule: the file or
        index named in config.json, else the single file, else the files of the index. If there are none of these, all
        safetensors in the directory belong to the model, as in vLLM."""
        source = self._whole_config.text(WEIGHTS_FIELD) if self._whole_config.has(WEIGHTS_FIELD) else None
        if source is not None and not (_is_plain(source) and source.endswith((".safetensors", INDEX_SUFFIX))):
            raise self._whole_config.refusal(
                WEIGHTS_FIELD, f"the name of a file in the directory that ends with .safetensors or {INDEX_SUFFIX}"
            )
        source = source or next((name for name in (WEIGHTS, INDEX) if name in names), None)
        if source is None:
            return None, [self.path / name for name in names if name.endswith(".safetensors")]
        if not source.endswith(INDEX_SUFFIX):
            return None, [self.path / source]
        index = self._needed(source)
        parts = sorted(set(map(str, index.fields("weight_map").content.values())))
        for part in parts:
            if not (_is_plain(part) and part.endswith(".safetensors")):
                raise ModelDirectoryError(
                    f"{index.file}: weight_map has {shown(part)}, must have names of safetensors files in the same "
                    "directory"
                )
        if missing := [part for part in parts if part not in names]:
            raise ModelDirectoryError(
                f"{index.file}: lists {missing[0]}, which does not exist ({len(missing)} of {len(parts)} files missing)"
            )
        return index.file, [self.path / part for part in parts]

    @cached_property
    def model_fingerprint(self) -> str:
        """SHA-256, in hex, of configuration and weights (see `add_sample`)."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        weights = self.weights()
        if not weights:
            raise ModelDirectoryError(f"{self.path}: no weights (*.safetensors or *.onnx)")
        for file in weights:
            add_sample(digest, file)
        return digest.hexdigest()


def _context_by_yarn(config: Fields) -> int:
    """Return the context extended by YaRN, in tokens; 0 if there is no YaRN, or no original context to extend."""
    key = next((key for key in ("rope_scaling", "rope_parameters") if config.has(key)), None)
    if key is None:
        return 0
    parameters = config.fields(key)
    kinds = [kind for kind, value in parameters.content.items() if isinstance(value, dict)]  # by kind of layer
    longest = 0
    for rope in [parameters.fields(kind) for kind in kinds] or [parameters]:
        is_yarn = rope.content.get("rope_type", rope.content.get("type")) == "yarn"
        if is_yarn and rope.has(ORIGINAL_CONTEXT) and rope.has("factor"):
            original = rope.integer(ORIGINAL_CONTEXT, 1, MAX_CONTEXT)
            longest = max(longest, int(min(rope.number("factor") * original, MAX_CONTEXT)))
    return longest


def _is_plain(name: str) -> bool:
    """Return whether a name denotes a file in the directory itself."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _missing(path: Path) -> str:
    """Return the error message for a path that does not exist."""
    if path.is_symlink():
        return f"a link to {os.readlink(path)}, which does not exist"
    if HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        return f"no such directory; models are not downloaded automatically, use `hf download {path} --local-dir DIR`"
    return "no such directory"


def _instead_of(file: Path) -> str:
    """Return advice on what to use instead of a file."""
    if file.suffix in (".safetensors", ".bin", ".json", ".onnx", ".pt", ".pth"):
        return f"give its directory {file.parent}, if that has a config.json"
    return "give the directory with config.json, tokenizer.json and *.safetensors"


def _listing_tokens(tokenizer: Fields) -> Fields:
    """Return the fields of tokenizer.json that list tokens. The others, such as merges, take up to 100 MB."""
    listing: dict[str, Any] = {
        name: tokenizer.content[name] for name in ("added_tokens", "model") if name in tokenizer.content
    }
    if isinstance(model := listing.get("model"), dict):
        listing["model"] = {name: value for name, value in model.items() if name == "vocab"}
    return replace(tokenizer, content=listing)


def _pieces(tokenizer: Fields) -> dict[str, int]:
    """Return the token ids of the model in tokenizer.json, without added tokens."""
    model = tokenizer.fields("model")
    vocabulary = model.content.get("vocab")
    if isinstance(vocabulary, list):  # unigram: [token, score], in order of id
        for entry in vocabulary:
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
                raise ModelDirectoryError(
                    f"{model.file}: model.vocab has the entry {shown(entry)}, must have pairs of a token and its score"
                )
        pieces = {token: number for number, (token, _) in enumerate(vocabulary)}
    elif isinstance(vocabulary, dict):
        for token, number in vocabulary.items():
            if not is_integer(number, 0, MAX_TOKEN_ID):
                raise ModelDirectoryError(
                    f"{model.file}: model.vocab has {shown(number)} as the id of {shown(token)}, must have an integer "
                    f"from 0 to {MAX_TOKEN_ID}"
                )
        pieces = dict(vocabulary)
    else:
        raise model.refusal("vocab", "an object or a list")
    return pieces
