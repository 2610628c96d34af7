"""Hidden states: what a model's output head reads, taken from a forward pass while it runs.

Heads and drafters that go on from a target's states (Medusa, EAGLE) want them beside the logits of the same pass. Every
way of running a model's layers ends in its output head, a module: a hook on it sees them all, and none is there while
nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel


def with_hidden_states(model: PreTrainedModel, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Run a forward pass; return its logits and the hidden states [n, hidden_size] of the same rows, as the model has
    computed them: after the last norm, and whatever else comes before its output head."""
    read: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        logits = run()
    finally:
        hook.remove()
    (hidden,) = read
    return logits, hidden.flatten(0, -2)
