"""Model directories shared by the service tests: a target, a draft near it, one far from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.heads import RandomBlock, make_block, make_eagle3, make_heads, make_mtp
from tests.margins import Oracle
from tests.models import make, near


@dataclass(frozen=True)
class Directories:
    target: Path
    near: Path  # often agrees with the target
    other: Path  # another model that sometimes agrees
    random: Path  # agrees only by chance
    foreign: Path  # has another tokenizer
    heads: Path  # Medusa heads with random weights
    eagle3: Path  # EAGLE-3 heads with random weights
    dflash: Path  # block drafts with random weights
    dspark: Path
    mtp: Path  # an MTP layer with random weights
    oracle: Oracle


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    target = make("llama", root / "target")
    foreign = root / "foreign"
    shutil.copytree(target, foreign)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<other>"
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Directories(
        target=target,
        near=near(target, root / "near", noise=0.04),
        other=near(target, root / "other", noise=0.12),
        random=make("gpt2", root / "random", seed=7),
        foreign=foreign,
        heads=make_heads(root / "heads"),
        eagle3=make_eagle3(root / "eagle3"),
        dflash=make_block(root / "dflash"),
        dspark=make_block(root / "dspark", RandomBlock(from_anchor=True, rank=8, confidence=True, reads_markov=True)),
        mtp=make_mtp(root / "mtp", target),
        oracle=Oracle(target),
    )
