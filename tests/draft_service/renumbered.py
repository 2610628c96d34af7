"""The demo draft with another tokenizer: the same model, whose tokens have other ids."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec.local import DEMO

EMBEDDING = "model.embed_tokens.weight"


def renumbered(folder: Path, *, without: float = 0.0, source: Path = DEMO / "draft", seed: int = 1) -> Path:
    """Write a copy of a draft in which every token has another id, and a share of the tokens longer than a byte is
    missing; return its folder."""
    dice = random.Random(seed)
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    special = {added["content"] for added in tokenizer["added_tokens"]}
    missing = {
        piece for piece in sorted(vocabulary) if len(piece) > 1 and piece not in special and dice.random() < without
    }
    kept = [piece for piece in vocabulary if piece not in missing]
    dice.shuffle(kept)
    tokenizer["model"]["vocab"] = ids = {piece: number for number, piece in enumerate(kept)}
    tokenizer["model"]["merges"] = [m for m in merges if missing.isdisjoint((*m, "".join(m)))]
    for added in tokenizer["added_tokens"]:
        added["id"] = ids[added["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING][torch.tensor([vocabulary[piece] for piece in kept])].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (end,) = (ids[content] for content in special)
    _edit(folder / "config.json", vocab_size=len(kept), eos_token_id=end)
    _edit(folder / "generation_config.json", eos_token_id=end)
    return folder


def _edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
