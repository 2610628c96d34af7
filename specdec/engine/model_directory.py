"""A model directory in Hugging Face's layout, read without torch: configuration and identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

GRAPH = "model.onnx"
COPY_GRAPH = "copy.onnx"
DESCRIPTION = "specdec.json"
"""What an exported model has beside configuration and tokenizer."""

SAMPLED_BYTES = 1 << 20
"""Of each weight file this much, in 64 evenly spaced pieces, enters the fingerprint beside header and
size: enough to tell two trainings apart, quick for 140 GB."""


class ModelDirectoryError(Exception):
    """The directory is missing, incomplete, or holds what cannot be served."""


@dataclass(frozen=True)
class ModelDirectory:
    """What can be known of a model without loading it."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise ModelDirectoryError(f"{self.path}: no such directory")
        for name in ("config.json", "tokenizer.json"):
            if not (self.path / name).is_file():
                raise ModelDirectoryError(f"{self.path}: no {name}")
        if not isinstance(self.config.get("vocab_size"), int):
            raise ModelDirectoryError(f"{self.path}: config.json names no vocab_size")

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelDirectoryError(f"{file}: not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelDirectoryError(f"{file}: not a JSON object")
        return content

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; for a multimodal wrapper, its text part."""
        config = self._json("config.json")
        text = config.get("text_config")
        return text if isinstance(text, dict) else config

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def vocabulary(self) -> int:
        """Width of the logits, padding included."""
        return int(self.config["vocab_size"])

    @property
    def context(self) -> int:
        """Longest text in tokens."""
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(self.config.get(key), int):
                return int(self.config[key])
        raise ModelDirectoryError(f"{self.path}: config.json names neither max_position_embeddings nor n_positions")

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a text, from generation_config.json, else config.json."""
        sources = (self._json("generation_config.json"), self.config, self._json("config.json"))
        found: Any = next((ids for source in sources if (ids := source.get("eos_token_id")) is not None), [])
        return frozenset(found if isinstance(found, list) else [found])

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256, hex, over which id means which text, however the file spells it."""
        tokenizer = self._json("tokenizer.json")
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        pieces = (
            {token: number for number, (token, _) in enumerate(vocabulary)}  # unigram: a list with scores
            if isinstance(vocabulary, list)
            else dict(vocabulary)
        )
        pieces |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}
        meaning = sorted((number, token) for token, number in pieces.items())
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()

    def check_pair(self, other: ModelDirectory) -> None:
        """ModelDirectoryError unless one can guess for the other."""
        if self.tokenizer_fingerprint != other.tokenizer_fingerprint:
            raise ModelDirectoryError(f"the tokenizers of {other.path} and {self.path} differ: they cannot be paired")

    @cached_property
    def model_fingerprint(self) -> str:
        """SHA-256, hex, over configuration and weights (see SAMPLED_BYTES)."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        weights = sorted([*self.path.glob("*.safetensors"), *self.path.glob("*.onnx*")])
        if not weights:
            raise ModelDirectoryError(f"{self.path}: no weights (*.safetensors or *.onnx)")
        for file in weights:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                pieces = 64
                for i in range(pieces):
                    stream.seek(i * max(0, size - SAMPLED_BYTES // pieces) // (pieces - 1))
                    digest.update(stream.read(SAMPLED_BYTES // pieces))
        return digest.hexdigest()
