"""A padded model: a copy with the same outputs at a higher cost, standing in for a larger model in measurements.

Every MLP gets extra units with small random input weights and zero output weights. Their contribution is multiplied by
zero, so the logits stay the same up to the summation order, but each forward pass reads and multiplies all of them. A
small model is not bound by memory bandwidth; a padded one is, like real targets.

README.md and config.json of the copy label it as padded: it is no better than its source.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LABEL = "padded"
"""Key in config.json of a padded model, with its source and sizes."""
MULTIPLE = 64  # of the intermediate size, as in real models: kernels work in blocks
SPREAD = 0.01  # of the added input weights
_INPUTS, _OUTPUT = ("gate_proj", "up_proj"), "down_proj"


class PaddingError(Exception):
    """Raised, with a one-line message, if the model cannot be padded to this size."""


def pad_model(source: Path, out: Path, parameters: int) -> dict[str, Any]:
    """Write to `out` a copy with about `parameters` parameters, and return its label."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    outputs = [name for name in tensors if name.endswith(f"mlp.{_OUTPUT}.weight")]
    if not outputs or LABEL in config:
        raise PaddingError(f"{source.name}: " + ("already padded" if outputs else "no Llama-style MLPs"))
    hidden, before = tensors[outputs[0]].shape
    count = sum(tensor.numel() for tensor in tensors.values())
    added = MULTIPLE * round((parameters - count) / (3 * hidden * len(outputs)) / MULTIPLE)
    after = MULTIPLE * math.ceil((before + added) / MULTIPLE)
    if after <= before:
        raise PaddingError(f"{source.name} has {count} parameters already")

    generator = torch.Generator().manual_seed(0)
    for output in outputs:
        for name in [output, *(output.replace(_OUTPUT, projection) for projection in _INPUTS)]:
            tensors[name] = _padded(tensors[name], after - before, generator, zeros=name == output)
            bias = name.replace(".weight", ".bias")
            if bias in tensors and name != output:
                tensors[bias] = torch.cat([tensors[bias], tensors[bias].new_zeros(after - before)])

    label = {
        "source": source.resolve().name,
        "source_parameters": count,
        "source_intermediate_size": before,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "intermediate_size": after,
    }
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith((".", "README", "config.json", "model", "pytorch_model")):
            shutil.copy(file, out / file.name)
    config |= {"intermediate_size": after, LABEL: label}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "README.md").write_text(_card(label), encoding="utf-8")
    return label


def _padded(weight: torch.Tensor, units: int, generator: torch.Generator, *, zeros: bool) -> torch.Tensor:
    """Return the weight with `units` more units: columns of zeros, or rows of small random numbers."""
    if zeros:
        return torch.cat([weight, weight.new_zeros(len(weight), units)], dim=1)
    rows = SPREAD * torch.randn(units, weight.shape[1], generator=generator)
    return torch.cat([weight, rows.to(weight.dtype)])


def _card(label: dict[str, Any]) -> str:
    return f"""# PADDED: a stand-in for measurements of speed, not a larger model

This is `{label["source"]}` ({label["source_parameters"] / 1e6:.1f}M parameters) with its MLPs padded from \
{label["source_intermediate_size"]} to {label["intermediate_size"]} units, {label["parameters"] / 1e6:.1f}M parameters \
in all. The output weights of the added units are zero: it says exactly what its source says, costs what a \
model of its size costs, and knows nothing more.

Made by `python -m bench pad-model`. Figures measured on it must say that it is padded.
"""
