"""Models with faults that exactness must handle: these have them on any machine, real kernels only on some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.models import ARCHITECTURES, save


class FickleLinear(torch.nn.Linear):
    """Its bits depend on the number of rows, as with kernels that sum differently for few, some, many, and very
    many."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        kind = sum(rows > limit for limit in (1, 19, 512))
        y: Tensor = super().forward(x)
        return y * (1.0 + 4 * kind * torch.finfo(y.dtype).eps)


class FickleConfig(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "fickle"


class FickleForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """All its layers are fickle."""

    config_class = FickleConfig

    def __init__(self, config: FickleConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = FickleLinear


class CrowdedConfig(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "crowded"


class CrowdedForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Every row affects the others, but too little to fail the comparison with the model's own forward pass."""

    config_class = CrowdedConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 1e-5 * kwargs["input_ids"].float().mean()
        return output


MODELS: dict[str, tuple[Any, Any]] = {
    "fickle": (FickleConfig, FickleForCausalLM),
    "crowded": (CrowdedConfig, CrowdedForCausalLM),
}


def make(name: str, directory: Path) -> Path:
    """Save a model and register it with transformers."""
    config, model = MODELS[name]
    transformers.AutoConfig.register(name, config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model(config(**ARCHITECTURES["llama"]().config.to_dict() | {"model_type": name}))
    return save(made, directory)
