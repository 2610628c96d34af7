"""Medusa heads: guesses of the tokens after the next one, from the hidden state that determines the next one.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class MedusaShape(NamedTuple):
    """The sizes of a set of heads."""

    heads: int
    layers: int  # residual blocks of a head
    hidden: int  # d, the width of the target's hidden states
    outputs: int  # own output heads: one per head, or one for all; 0: the heads use the target's


class MedusaHeads(torch.nn.Module):
    """Heads i = 0 ... H - 1 over the hidden state h_t that determines the token at t + 1. Head i guesses the token at
    t + 2 + i (equation 1 of the paper, with L blocks instead of one):

        r_0 = h_t,   r_l = r_(l-1) + SiLU(W_il r_(l-1) + b_il),   logits_i = U_i r_L
    """

    def __init__(
        self,
        weights: Tensor,
        biases: Tensor | None,
        outputs: Tensor | Callable[[Tensor], Tensor],
        *,
        vocabulary: int,
        ids: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """`weights` [H, L, d, d] and `biases` [H, L, d]; `outputs` [H, ids, d], [ids, d] shared by all heads, or the
        target's function from states [n, d] to logits; `ids`: token ids of the rows of `outputs`, int64; None: row
        number = id. `scale` multiplies the logits."""
        super().__init__()
        self.weights = torch.nn.Parameter(weights, requires_grad=False)
        self.biases = None if biases is None else torch.nn.Parameter(biases, requires_grad=False)
        self.outputs = torch.nn.Parameter(outputs, requires_grad=False) if isinstance(outputs, Tensor) else None
        self._target_output = None if isinstance(outputs, Tensor) else outputs
        self.vocabulary = vocabulary
        self._ids = ids
        self._scale = scale

    @classmethod
    def untrained(cls, count: int, layers: int, output: torch.nn.Linear, *, own_outputs: bool) -> MedusaHeads:
        """Return `count` heads in float32 that give the target's own logits: their blocks are zeros, and they share the
        target's output head, or with `own_outputs` each has a copy of it."""
        weight = output.weight.detach().float()
        bias = None if output.bias is None else output.bias.detach().float()
        vocabulary, width = weight.shape
        return cls(
            weight.new_zeros(count, layers, width, width),
            weight.new_zeros(count, layers, width),
            weight.expand(count, -1, -1).clone() if own_outputs else lambda states: F.linear(states, weight, bias),
            vocabulary=vocabulary,
        )

    @property
    def shape(self) -> MedusaShape:
        heads, layers, hidden, _ = self.weights.shape
        outputs = 0 if self.outputs is None else heads if self.outputs.dim() == 3 else 1
        return MedusaShape(heads, layers, hidden, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, H, vocabulary], float32, of hidden states [n, d]; -inf for tokens that the heads cannot
        guess."""
        count = self.weights.shape[0]
        states = torch.stack([self._state(number, hidden) for number in range(count)])
        if self.outputs is not None and self.outputs.dim() == 3:
            found = torch.bmm(states, self.outputs.transpose(1, 2))
        else:  # one product for all heads: the output head is read once
            found = self._output(states.flatten(0, 1)).view(*states.shape[:2], -1)
        logits = self._scaled(found).transpose(0, 1)
        if self._ids is None:
            return logits
        every = logits.new_full((*logits.shape[:2], self.vocabulary), -torch.inf)
        every[..., self._ids] = logits
        return every

    def head(self, number: int, hidden: Tensor) -> Tensor:
        """Return the logits [n, ids], float32, of one head, for training."""
        state = self._state(number, hidden)
        if self.outputs is not None and self.outputs.dim() == 3:
            return self._scaled(F.linear(state, self.outputs[number]))
        return self._scaled(self._output(state))

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.float() if self._scale == 1.0 else self._scale * logits.float()

    def _state(self, number: int, hidden: Tensor) -> Tensor:
        """Return the states [n, d] that one head's output head reads."""
        state = hidden.to(self.weights.dtype)
        for layer in range(self.weights.shape[1]):
            bias = None if self.biases is None else self.biases[number, layer]
            state = state + F.silu(F.linear(state, self.weights[number, layer], bias))
        return state

    def _output(self, states: Tensor) -> Tensor:
        """Apply the output head that all heads share to states [n, d]."""
        if self.outputs is not None:
            return F.linear(states, self.outputs)
        assert self._target_output is not None
        return self._target_output(states)
