"""The directory of a trained draft, in Hugging Face's layout."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec.engine.hf.pretrained import DTYPES
from specdec.engine.model_directory import WEIGHTS, WEIGHTS_FIELD, ModelDirectory
from specdec.engine.preflight.weights import tensors
from specdec.training.files import PARTIAL, WriteError, as_stored, replace_json, replacing

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
GENERATION = "generation_config.json"

LEFT_OUT = frozenset({WEIGHTS_FIELD, "auto_map"})
"""Fields that are left out of config.json, because they name files that are not copied."""

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their names in the headers of weight files."""


@dataclass(frozen=True)
class DraftFiles:
    """The files of a trained draft besides its weights, and the dtype of the weights."""

    draft: ModelDirectory  # the source of its configuration
    tokenizer: ModelDirectory  # the source of its tokenizer
    dtype: torch.dtype

    def write(self, model: PreTrainedModel, out: Path) -> None:
        """Write weights and config.json, and copy the other files unless they exist. Raise WriteError if one cannot be
        written; its previous version is kept."""
        for source, names in ((self.tokenizer.path, TOKENIZER_FILES), (self.draft.path, (GENERATION,))):
            for name in names:
                if (source / name).is_file() and not (out / name).is_file():
                    with replacing(out / name) as partial:
                        shutil.copyfile(source / name, partial)
        config = {name: value for name, value in self.draft.whole_config.items() if name not in LEFT_OUT}
        replace_json(out / "config.json", config | {"dtype": str(self.dtype).removeprefix("torch.")})
        _write_weights(model, self.dtype, out / WEIGHTS)


def _write_weights(model: PreTrainedModel, dtype: torch.dtype, file: Path) -> None:
    """Write a model's weights in `dtype`. The file is written by transformers, which knows the stored names of each
    architecture's tensors; other files that transformers writes are discarded."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights stay one tensor, stored once
    state = {
        name: copies.setdefault((tensor.data_ptr(), tensor.shape), as_stored(tensor, dtype))
        for name, tensor in model.state_dict().items()
    }
    folder = file.with_name(f"{file.name}{PARTIAL}")
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config = GenerationConfig()  # transformers refuses to write some values that it reads
    try:
        model.save_pretrained(folder, state_dict=state, max_shard_size=2**62)  # one file, replaced atomically
        (folder / WEIGHTS).chmod(0o644)  # for services of other users
        os.replace(folder / WEIGHTS, file)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WriteError(f"{file}: cannot be written: {why}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def dtype_of_weights(directory: ModelDirectory) -> torch.dtype:
    """Return the dtype of a model's weights: the one in config.json, else the dtype of most stored numbers; float32 if
    there are none."""
    if (named := DTYPES.get(str(directory.dtype))) is not None:
        return named
    stored: Counter[str] = Counter()
    for file in directory.safetensors()[1]:
        for tensor in tensors(file).values():
            stored[tensor["dtype"]] += math.prod(tensor["shape"])
    found = next((STORED[name] for name, _ in stored.most_common() if name in STORED), None)
    return found or torch.float32
