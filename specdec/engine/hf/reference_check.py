"""The reference check: at start, an engine's logits are compared with the logits of the model's own forward pass."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.engine import Engine
from specdec.engine.hf import attention_hook
from specdec.engine.hf.block_linear import BlockLinear
from specdec.engine.hf.pretrained import is_quantised
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import with_class
from specdec.engine.preflight.finite_weights import check_finite
from specdec.engine.unsupported import UnsupportedModelError

DISAGREEMENT = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest allowed difference from the model's own logits, relative to the largest of them, by dtype."""

QUANTISED_DISAGREEMENT = 0.05
"""The allowed relative difference for a quantised model is at least this: if activations are quantised too, a rounding
difference can move a number by a whole quantisation step."""

TOKENS = 24
"""Length of the text, below the least context (`model_directory.MIN_CONTEXT`)."""


@dataclass(frozen=True)
class ReferenceCheck:
    """Finite logits of a short text and of a branch in it, from the unmodified model's forward pass."""

    name: str  # class of the model
    allowed: float  # maximum difference, relative to the largest logit
    text: list[int]
    branch: list[int]  # other tokens in place of the last ones
    logits: Tensor  # [2, vocabulary] at the last token of the text and of the branch

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, directory: ModelDirectory) -> ReferenceCheck:
        """Run the model's own forward pass; UnsupportedModelError if it fails, or its logits are not finite.
        ModelDirectoryError, with file and tensor, if a weight is not finite."""
        vocabulary = directory.vocabulary
        text = np.random.default_rng(0).integers(1, vocabulary, TOKENS).tolist()
        branch = [(text[-2] + 1) % vocabulary, (text[-1] + 2) % vocabulary]
        texts = torch.tensor([text, text[:-2] + branch], device=model.device)
        name, dtype = type(model).__name__, model.dtype
        try:
            model.set_attn_implementation("eager")
            logits = model(input_ids=texts, use_cache=False, logits_to_keep=1).logits[:, -1].float().cpu()
            allowed = max(DISAGREEMENT[dtype], QUANTISED_DISAGREEMENT if _rounds_more(model) else 0.0)
        except Exception as error:  # such as a kernel without support for this shape
            raise UnsupportedModelError(f"{name} cannot run here: {with_class(error)}") from error
        finally:
            model.set_attn_implementation(attention_hook.NAME)
        if not logits.isfinite().all():
            check_finite(directory)
            narrow = ", with a maximum of 65504: use float32 or bfloat16" if dtype == torch.float16 else ""
            raise UnsupportedModelError(f"{directory.path}: its own logits are not finite in {str(dtype)[6:]}{narrow}")
        return cls(name, allowed, text, branch, logits)

    @property
    def contents(self) -> bytes:
        """A digest of the logits. They depend on nearly all weights, which is enough for a cache key of numerics."""
        return hashlib.sha256(self.logits.numpy().tobytes()).digest()

    def check(self, engine: Engine) -> None:
        """Raise UnsupportedModelError if the engine fails on the text and its branch in one batch, or gives other
        logits. This detects kernels that do not run here, and architectures that compute more than our attention or the
        joined layers do."""
        length = len(self.text)
        slots = np.arange(1, length + 3)
        packer = engine.packer()
        rows = packer.add_rows(self.text, 0, slots[:length])
        packer.add_path(slots[:length], list(rows))
        side = packer.add_rows(self.branch, length - 2, slots[length:])
        packer.add_path(np.concatenate([slots[: length - 2], slots[length:]]), list(side))
        packer.want(rows[-1])
        packer.want(side[-1])
        try:
            got = torch.from_numpy(engine.forward(packer.pack()))
        except Exception as error:  # such as a kernel's: no compiler for it, or too little shared memory on the GPU
            raise UnsupportedModelError(
                f"{self.name} cannot run here in a packed batch: {with_class(error)}"
            ) from error
        difference = float((got - self.logits).abs().max() / self.logits.abs().max())
        if not difference <= self.allowed:
            raise UnsupportedModelError(
                f"{self.name}: packed logits differ from the model's own by {difference:.2g} times the "
                "largest logit; the model has an operation that packed attention or the joined layers do not support"
            )


def _rounds_more(model: PreTrainedModel) -> bool:
    return is_quantised(model) or any(isinstance(module, BlockLinear) for module in model.modules())
