"""Hidden states: the inputs of a model's output head, captured during a forward pass.

Heads and drafters that build on a target's states (Medusa, EAGLE) need them beside the logits of the same pass. However
a model's layers are run, its output head is a module called last: a hook on it works in all cases, and costs nothing
unless hidden states are requested.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel


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
