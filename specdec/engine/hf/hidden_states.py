"""Hidden states: the inputs of a model's output head, and of its layers, captured during a forward pass.

Heads and drafters that build on a target's states (Medusa, EAGLE) need them with the logits of the same pass. No matter
how the layers are run, the output head is called last, as a module. So a hook on it always works, and costs nothing
unless hidden states are requested. Layers are called as modules only in transformers' own forward pass; our decoders
call `Features.keep` themselves.
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
    """Run a forward pass; return its logits and the hidden states [n, hidden_size] of the same rows: after the last
    norm and everything else that the model computes before its output head."""
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
    for module in model.modules():  # outermost first: a layer may have the same number of experts
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(
        f"{type(model).__name__} does not keep its {count} decoder layers in one list, so their inputs cannot be "
        "captured"
    )


class Features:
    """The residual stream entering each of `layers`, kept during one forward pass. A layer number equal to the number
    of layers means the states after the last norm."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._kept: dict[int, Tensor] = {}

    def keep(self, layer: int, stream: Tensor) -> None:
        """Copy the stream [t, d] entering a layer, if the layer is in `layers`: the stream's memory may be reused."""
        if layer in self.layers:
            self._kept[layer] = stream.clone()

    @contextmanager
    def of(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep the inputs of the model's own layers while the context is open, for one pass. The inputs [n, t, d] of n
        texts are kept as [n * t, d]."""
        layers = decoder_layers(model)

        def keeping(layer: int) -> Callable[..., None]:
            def keep(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                stream: Tensor = arguments[0] if arguments else named["hidden_states"]
                self.keep(layer, stream.flatten(0, -2))

            return keep

        def keep_last(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self.keep(len(layers), output.last_hidden_state.flatten(0, -2))

        hooks = [
            layers[layer].register_forward_pre_hook(keeping(layer), with_kwargs=True)
            for layer in set(self.layers) - {len(layers)}
        ]
        if len(layers) in self.layers:
            hooks.append(model.get_decoder().register_forward_hook(keep_last))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def stacked(self) -> Tensor:
        """Return the features [t, len(layers), d]."""
        return torch.stack([self._kept[layer] for layer in self.layers], dim=1)
