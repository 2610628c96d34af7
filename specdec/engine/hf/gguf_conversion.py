"""Conversion of a GGUF file into a model directory: transformers reads configuration, tokenizer and weights.

This module adds what transformers does not read: fields of the configuration (`hf/gguf_config.py`), and all tokens that
end a turn. Quantised weights are dequantised.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.utils import logging as transformers_logging

from specdec.engine import hub
from specdec.engine.gguf_file import MARKER
from specdec.engine.hf.gguf_config import ROPE_FACTORS, configuration, value_of
from specdec.engine.memory import free_on_host
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, in_one_line
from specdec.engine.model_folder import replaced
from specdec.engine.start_phases import Progress

MAX_SHARD_BYTES = 1 << 29
"""Maximum bytes of a weight file: while it is written, memory holds a copy of its weights."""

PIECE_ROWS = 4096
"""Rows of a tensor dequantised at a time."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Storage formats of unquantised GGUF weights."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields of `tokenizer.ggml` with the token that ends a text, a turn or a message."""

ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|return|>",
    }
)
"""Control tokens that llama.cpp recognises by name as ends of a text, in files that lack END_KEYS for them."""


def convert(
    file: Path, target: Path, dtype: str | None = None, progress: Progress = lambda what, done, total: None
) -> None:
    """Write a GGUF file's model into `target`, completely or not at all.

    `dtype` of the weights: None means the file's own, or bfloat16 if they are quantised. An earlier conversion in
    `target` is replaced. Raises ModelDirectoryError, in one line, if the file cannot be converted.
    """
    hub.disable()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # The libraries also read other files next to the one they are given, such as another model's tokenizer.
        with tempfile.TemporaryDirectory(prefix="specdec-gguf-") as alone, replaced(target, MARKER, file) as folder:
            (Path(alone) / file.name).symlink_to(file.absolute())
            _convert(file, Path(alone), folder, dtype, progress)
    except ModelDirectoryError:
        raise
    except Exception as error:  # the libraries' errors have no common base
        raise ModelDirectoryError(f"{file}: cannot be converted: {in_one_line(error)}") from error


def _convert(file: Path, alone: Path, folder: Path, dtype: str | None, progress: Progress) -> None:
    """Write the model of a file; the folder `alone` contains only a link to the file."""
    reader = gguf.GGUFReader(file)
    if (parts := value_of(reader, "split.count") or 1) > 1:
        raise ModelDirectoryError(
            f"{file}: is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge`"
        )
    tokenizer = AutoTokenizer.from_pretrained(
        alone, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
    count = len(value_of(reader, "tokenizer.ggml.tokens"))
    _drop_foreign_tokens(folder / "tokenizer.json", count)
    config = configuration(alone, reader, file)
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    chosen = _dtype(types) if dtype is None else getattr(torch, dtype)
    _check_room(file, folder, types.total() * chosen.itemsize)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=chosen)
    model.load_state_dict(_weights(reader, file, model, chosen, progress), strict=False, assign=True)
    model.tie_weights()
    missing = sorted(name for name, tensor in model.state_dict().items() if tensor.is_meta)
    if missing:
        raise ModelDirectoryError(f"{file}: {len(missing)} tensors are missing, such as {missing[0]}")
    model.generation_config = GenerationConfig(eos_token_id=_ends(reader))
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_BYTES)
    (folder / MARKER).write_text(json.dumps({"file": file.name, "types": dict(sorted(types.items()))}, indent=2) + "\n")
    _check(ModelDirectory(folder), count, file)


def _weights(
    reader: gguf.GGUFReader, file: Path, model: PreTrainedModel, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    """Return the weights by the model's names for them, using transformers' rules for each architecture. transformers'
    own loop (`load_gguf_checkpoint`) dequantises whole tensors, using several times their memory."""
    parsed = load_gguf_checkpoint(str(file), return_tensors=False)
    processor = TENSOR_PROCESSORS.get(value_of(reader, "general.architecture"), TensorProcessor)(
        config=parsed["config"]
    )
    names = get_gguf_hf_weights_map(model, processor)
    tensors = _Tensors(dtype)
    parsed["tensors"] = tensors  # processors add experts, and GPT-2's output head, in float32
    total, done = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0
    for tensor in reader.tensors:
        found = processor.process(
            weights=_dequantised(tensor), name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed
        )
        if found.name is not None and found.name not in names and found.name != ROPE_FACTORS:
            raise ModelDirectoryError(f"{file}: {found.name} has no place in transformers' {type(model).__name__}")
        if found.name in names:
            tensors[names[found.name]] = torch.from_numpy(np.require(found.weights, requirements=("C", "W")))
        done += int(tensor.n_bytes)
        progress("converting", done, total)
    return tensors


class _Tensors(dict[str, Tensor]):
    """Tensors by name, each converted to one dtype when it is added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        super().__setitem__(name, tensor.to(self._dtype))


def _dequantised(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """Return a tensor's numbers, dequantised PIECE_ROWS rows at a time."""
    data = tensor.data
    if data.ndim < 2:
        return np.asarray(gguf.dequantize(data, tensor.tensor_type), np.float32)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    numbers = np.empty((math.prod(shape[:-1]), shape[-1]), np.float32)
    rows = data.reshape(-1, data.shape[-1])
    for begin in range(0, len(rows), PIECE_ROWS):
        place = slice(begin, begin + PIECE_ROWS)
        numbers[place] = gguf.dequantize(rows[place], tensor.tensor_type)
    return numbers.reshape(shape)


def _check_room(file: Path, folder: Path, size: int) -> None:
    """Raise ModelDirectoryError unless memory and disk have room for the converted weights."""
    for where, free in (("memory", free_on_host()), ("the cache's disk", shutil.disk_usage(folder).free)):
        if size > free:
            raise ModelDirectoryError(
                f"{file}: needs {size / 1e9:.3g} GB of {where} to be converted, has {free / 1e9:.3g} GB"
            )


def _dtype(types: Counter[str]) -> torch.dtype:
    """Return the dtype for a file, given the count of numbers in each format: the most frequent format if none is
    quantised, else bfloat16."""
    most = max(FLOATS, key=lambda name: types[name])
    return FLOATS[most] if set(types) <= set(FLOATS) else torch.bfloat16


def _ends(reader: gguf.GGUFReader) -> list[int]:
    """Return the ids of all tokens that end a text or a turn."""
    found = {value_of(reader, f"tokenizer.ggml.{key}") for key in END_KEYS}
    tokens, types = (value_of(reader, f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    control = (number for number, kind in enumerate(types) if kind == gguf.TokenType.CONTROL)
    found |= {number for number in control if tokens[number] in ENDS}
    return sorted(int(number) for number in found if number is not None)


def _drop_foreign_tokens(file: Path, count: int) -> None:
    """Drop added tokens with ids of `count` or more: transformers' tokenizer class may define default special tokens
    that the model does not have."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _check(directory: ModelDirectory, count: int, file: Path) -> None:
    """Raise ModelDirectoryError unless the tokenizer has all of the file's ids, from 0 to `count` - 1."""
    missing = set(range(count)) - set(directory.tokens.values())
    if missing:
        raise ModelDirectoryError(
            f"{file}: {len(missing)} of its {count} tokens cannot be converted, first id {min(missing)}"
        )
