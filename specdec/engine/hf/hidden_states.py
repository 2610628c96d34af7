"""Hidden states: the inputs of a model's output head, and of its layers, captured during a forward pass.

Heads and drafters that build on a target's states (Medusa, EAGLE) need them beside the logits of the same pass. However
a model's layers are run, its output head is a module called last: a hook on it works in all cases, and costs nothing
unless hidden states are requested. Layers are modules only if the model runs its own; a decoder of ours keeps the
features by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.unsupported import UnsupportedModelError


def with_hidden_states(model: PreTrainedModel, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Run a forward pass; return its logits and the hidden states [n, hidden_size] of the same rows, as computed by the
    model: after the last norm, and everything else before its output head."""
    read: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        logits = run()
    finally:
        hook.remove()
    (hidden,) = read
    return logits, hidden.flatten(0, -2)


def decoder_layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """Return a model's decoder layers in order; UnsupportedModelError if they are not in one list."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():  # the outermost first: experts of a layer may be as many
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of its {count} layers, so it gives no features")


class Features:
    """The residual stream entering each of `layers`, kept during one forward pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._kept: dict[int, Tensor] = {}

    def keep(self, layer: int, stream: Tensor) -> None:
        """Keep a copy of the stream [t, d] entering a layer, if it is one of `layers`: its memory may be used again."""
        if layer in self.layers:
            self._kept[layer] = stream.clone()

    @contextmanager
    def of(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep what enters the model's own layers meanwhile, for texts [n, t, d] in a pass, one after the other."""
        layers = decoder_layers(model)

        def keeping(layer: int) -> Callable[..., None]:
            def keep(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                stream: Tensor = arguments[0] if arguments else named["hidden_states"]
                self.keep(layer, stream.flatten(0, -2))

            return keep

        hooks = [
            layers[layer].register_forward_pre_hook(keeping(layer), with_kwargs=True) for layer in set(self.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def stacked(self) -> Tensor:
        """Return the features [t, len(layers), d]."""
        return torch.stack([self._kept[layer] for layer in self.layers], dim=1)
