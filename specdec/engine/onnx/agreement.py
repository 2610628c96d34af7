"""Agreement of a quantised export with its model. It bounds a draft's loss of acceptance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from specdec.engine.engine import Engine
from specdec.engine.hf import attention_hook
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.preflight.memory_needed import SAMPLE_TOKENS

ROWS_A_PASS = 96
"""Rows compared at a time: the logits of 1,024 rows of a vocabulary of 262,144 tokens would take a gigabyte."""

SAMPLE = '''The parser reads one line at a time. A line that starts with a hash is a comment; everything else must be a
name, an equals sign and a value. Unknown names are reported with their line number, but the file is read to its end, so
that all mistakes are known at once.

```python
def read_settings(path: str, known: dict[str, type]) -> dict[str, object]:
    """Read a file of settings and return the values by name."""
    settings: dict[str, object] = {}
    errors: list[str] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, _, value = line.partition("=")
            if name.strip() not in known:
                errors.append(f"{path}:{number}: unknown setting {name.strip()!r}")
                continue
            settings[name.strip()] = known[name.strip()](value.strip())
    if errors:
        raise ValueError("\\n".join(errors))
    return settings
```

How many of the 24 settings are needed at start? Three: the address, the port and the name of the model. The others have
defaults, which were chosen in 2019 and have not changed since. Why is that? Nobody asked for more.
'''
"""Prose, code, and questions, as in the texts that drafts continue."""


class Agreement(NamedTuple):
    """The agreement of two models' next-token distributions, averaged over the positions of a text."""

    overlap: float
    """The sum over tokens of the smaller probability: the probability that a draw from one distribution is accepted
    under the other. A draft's acceptance by its target changes by at most 1 - overlap."""
    divergence: float
    """KL(model || export), in nats."""
    greedy: float
    """Share of positions with the same most probable token."""


def sample_tokens(directory: ModelDirectory) -> list[int]:
    """Return the tokens of SAMPLE that fit into the model's context."""
    tokenizer = Tokenizer.from_file(str(directory.path / "tokenizer.json"))
    found: list[int] = tokenizer.encode(SAMPLE).ids
    return found[: min(SAMPLE_TOKENS, directory.context - 1)]


@torch.inference_mode()
def logits_of_model(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.float32]:
    """Return the model's own logits [n, vocabulary] after each token."""
    try:
        model.set_attn_implementation("eager")
        logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(attention_hook.NAME)
    return np.asarray(logits.float().cpu().numpy())


def agreement(engine: Engine, tokens: list[int], expected: NDArray[np.float32]) -> Agreement:
    """Compare an engine's distributions after each token with the `expected` logits [n, vocabulary]."""
    overlap = divergence = greedy = 0.0
    for begin in range(0, len(tokens), ROWS_A_PASS):
        end = min(begin + ROWS_A_PASS, len(tokens))
        for ours, theirs in zip(_logits(engine, tokens[:end], begin), expected[begin:end], strict=True):
            p, q = _log_probabilities(theirs), _log_probabilities(ours)
            overlap += float(np.exp(np.minimum(p, q)).sum())
            divergence += float((np.exp(p) * (p - q)).sum())
            greedy += float(ours.argmax() == theirs.argmax())
    return Agreement(*(total / len(tokens) for total in (overlap, divergence, greedy)))


def _logits(engine: Engine, tokens: list[int], begin: int) -> Iterable[NDArray[np.float32]]:
    """Return an engine's logits after each token from `begin` on."""
    slots = np.arange(1, len(tokens) + 1)
    packer = engine.packer()
    rows = packer.add_rows(tokens, 0, slots)
    packer.add_path(slots, list(rows))
    for row in list(rows)[begin:]:
        packer.want(row)
    found: Iterable[NDArray[np.float32]] = engine.forward(packer.pack())
    return found


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
