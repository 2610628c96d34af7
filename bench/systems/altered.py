"""Altered copies of models: with another configuration, with random weights, with another tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def copied(source: Path, folder: Path, **config: Any) -> Path:
    """Copy a model's directory to `folder`, with these changes of its configuration; return `folder`."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | config), encoding="utf-8")
    return folder


def random_weights(source: Path, folder: Path, dtype: str = "float32", **config: Any) -> Path:
    """Write a model with random weights and the source's tokenizer and configuration, with these changes; return
    `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = AutoConfig.from_pretrained(source)
    wanted.update(config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(wanted, dtype=getattr(torch, dtype)).save_pretrained(folder)
    for file in source.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def other_tokenizer(source: Path, folder: Path) -> Path:
    """Copy a model with two tokens swapped; return `folder`."""
    file = copied(source, folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokens = tokenizer["model"]["vocab"]
    a, b = list(tokens)[-2:]
    tokens[a], tokens[b] = tokens[b], tokens[a]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder
