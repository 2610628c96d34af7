"""Training on labels from serving, without a pass of the target. A place's label is the token that the target chose
there or, where it overruled the draft, its likeliest tokens with their probabilities (Liu et al. 2023).

Each token was chosen given the whole text before it, so windows never mix texts. A text's first window starts at its
beginning; a longer text continues in further windows that overlap by half, and only their new half counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.training.draft import DraftOrigin, DraftPlan, DraftTraining
from specdec.training.draft_files import DraftFiles
from specdec.training.texts import Mixture
from specdec.training.training import rows_a_pass

MIN_REST = 1e-6
"""Lower bound on the draft's probability of all other tokens; float32 sums have errors of this size."""

NO_TOKEN = -1
"""Position of padding in a window."""


@dataclass(frozen=True)
class ServedLabels:
    """The labels of n tokens; m of them have log-probabilities of the target."""

    tokens: Tensor  # int64 [n]
    chosen: Tensor  # bool [n]: the target chose the token; False in prompts
    places: Tensor  # int64 [n]: the token's row in `top_tokens` and `top_logprobs`, or -1
    top_tokens: Tensor  # int64 [m, k]
    top_logprobs: Tensor  # float32 [m, k]; -inf: no token
    weights: Tensor  # float32 [n]: weight of the token's loss

    def loss(self, positions: Tensor, counted: Tensor, log_q: Tensor) -> Tensor:
        """Return the weighted sum, [], of the losses of the counted tokens in some windows: KL from the target's
        likeliest tokens where these exist, else the token's -log q.

        `positions`: int64 [rows, length], the windows' tokens as indices into the n tokens. `counted`: bool, of the
        same shape, as returned by `counts`. `log_q`: log-probabilities of the draft, [rows, length, V]; the row of a
        place describes the token after it.
        """
        after, counted, log_q = positions[:, 1:], counted[:, 1:], log_q[:, :-1]
        soft = counted & (self.places[after] >= 0)
        one_hot = counted & ~soft
        device, weights = log_q.device, self.weights[after]
        labels = self.tokens[after][one_hot].to(device)
        hard_loss = -log_q[one_hot.to(device)].gather(-1, labels[:, None])[:, 0]
        rows = self.places[after][soft]
        soft_loss = divergence_of_top(
            self.top_tokens[rows].to(device), self.top_logprobs[rows].to(device), log_q[soft.to(device)]
        )
        total: Tensor = (hard_loss * weights[one_hot].to(device)).sum()
        return total + (soft_loss * weights[soft].to(device)).sum()

    def counts(self, positions: Tensor, first: Tensor, vocabulary: int) -> Tensor:
        """Return which tokens of windows have a loss, bool [rows, length]: tokens below `vocabulary` that the target
        chose, at or after index `first`, int64 [rows], of their window. A window's very first token has no loss."""
        places = torch.arange(positions.shape[1])
        is_new = (places >= first[:, None]) & (places > 0) & (positions != NO_TOKEN)
        return is_new & self.chosen[positions] & (self.tokens[positions] < vocabulary)


class TextWindows:
    """Windows of `length` tokens, each from one text, in random order; the same seed and step give the same windows."""

    def __init__(self, texts: Sequence[range], length: int) -> None:
        """`texts`: the positions of each text's tokens."""
        positions, first = [], []
        for text in texts:
            for begin in range(0, max(1, len(text) - length // 2), length // 2):
                found = torch.tensor(text[begin : begin + length], dtype=torch.int64)
                positions.append(torch.nn.functional.pad(found, (0, length - len(found)), value=NO_TOKEN))
                first.append(length // 2 if begin else 0)
        self.positions = torch.stack(positions)
        """Positions of the tokens of all windows, int64 [n, length], or NO_TOKEN."""
        self.first = torch.tensor(first)
        """Index of the first counted token of each window, int64 [n]."""

    def batch(self, rows: int, seed: int, step: int) -> Tensor:
        """Return the numbers of `rows` windows to train on, drawn with replacement, int64 [rows]."""
        generator = torch.Generator().manual_seed((seed << 32) + step)
        return torch.randint(len(self.first), (rows,), generator=generator)


def divergence_of_top(tokens: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p, q), [m], with all tokens except the given ones merged into one: p from log-probabilities [m, k] of
    int64 `tokens` [m, k] (-inf: no token), q from [m, V]. It never exceeds the KL of the whole distributions. Tokens
    beyond q's vocabulary are merged, too."""
    known = (log_p > -torch.inf) & (tokens < log_q.shape[-1])
    p = log_p.masked_fill(~known, -torch.inf).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=1.0)  # the sum of rounded values may exceed 1
    own = log_q.gather(-1, tokens.masked_fill(~known, 0))
    q_rest = (1 - own.exp().masked_fill(~known, 0.0).sum(-1)).clamp(min=MIN_REST)
    p_rest = (1 - p.sum(-1)).clamp(min=0.0)
    inside: Tensor = (torch.special.xlogy(p, p) - p * own).sum(-1)
    rest: Tensor = torch.special.xlogy(p_rest, p_rest) - p_rest * q_rest.log()
    return inside + rest


class ServedTraining(DraftTraining):
    """A training on labels from serving. No step runs the target, which only serves to measure the draft."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        mixture: Mixture,
        plan: DraftPlan,
        origin: DraftOrigin,
        files: DraftFiles,
        labels: ServedLabels,
        windows: TextWindows,
    ) -> None:
        """`mixture`: text to measure on, which contains none of the windows."""
        self._labels, self._windows = labels, windows
        super().__init__(target, draft, mixture, plan, origin, files, windows)

    def describe(self, loss: float) -> str:
        return f"step {self.done} of {self.total}, loss on served labels {loss:.3f}"

    def _learn(self, windows: Tensor) -> float:
        """Return the mean loss of the counted tokens in the windows with these numbers."""
        positions, first = self._windows.positions[windows], self._windows.first[windows]
        counted = self._labels.counts(positions, first, int(self._draft.config.get_text_config().vocab_size))
        count, total, at_once = max(1, int(counted.sum())), 0.0, rows_a_pass(self.plan, self._widest)
        for part, of_part in zip(torch.split(positions, at_once), torch.split(counted, at_once), strict=True):
            tokens = self._labels.tokens[part.clamp(min=0)]  # padding comes after all counted tokens
            log_q = self._draft(tokens.to(self._draft.device), use_cache=False).logits.float().log_softmax(-1)
            loss = self._labels.loss(part, of_part, log_q)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total / count
