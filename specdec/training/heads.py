"""Training of heads of any kind beside a frozen target: passes, accuracies of guesses, and the files of heads."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.training.files import as_stored, replace_json, replace_tensors
from specdec.training.plan import Origin
from specdec.training.texts import Windows
from specdec.training.training import P, Training, check_room, rows_a_pass

DECAY = 0.8
"""Weight of a guess's loss, relative to the previous guess's, as in Medusa and EAGLE-3."""

TOLD_RANKS = (1, 3, 10)


class HeadTraining(Training[P]):
    """A training of heads that guess tokens ahead from a target's states."""

    guess: ClassVar[str]
    """Name of the part that guesses one position ahead, in messages."""

    remedy: ClassVar[str]
    """Advice in the error for a device without room."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Windows,
        plan: P,
        origin: Origin,
        trained: Iterable[Tensor],
        kept: int,
        max_norm: float = math.inf,
    ) -> None:
        """`trained`, `max_norm`: as in Training; `kept`: as in `check_room`. UnsupportedModelError if the device has no
        room for the training."""
        self._model = model.requires_grad_(False).eval()
        self.windows = windows
        trained = [*trained]
        vocabulary = int(model.config.get_text_config().vocab_size)
        check_room(f"{self.trains} for {origin.target}", trained, plan, vocabulary, kept, model.device, self.remedy)
        super().__init__(plan, origin, windows, trained, max_norm)

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        """Raise UnsupportedModelError unless heads of this kind can be trained for a target."""

    @abstractmethod
    def _learn_part(self, windows: Tensor, share: float) -> float:
        """Accumulate the gradients of some windows [rows, length], times their `share` of the batch; return the first
        guess's loss, in nats per token, times `share`."""

    @abstractmethod
    def _guessed(self, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each position ahead, the likeliest guesses [n, k], best first, with k = 10 unless fewer exist, and
        the target's likeliest tokens [n], over places of windows [rows, length]."""

    @abstractmethod
    def _stored(self) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
        """Return the tensors, to be written in bfloat16, and the configuration of heads that can be loaded for the
        target."""

    def describe(self, loss: float) -> str:
        return f"step {self.done} of {self.total}, {loss:.3f} nats a token at the first {self.guess}"

    def _learn(self, windows: Tensor) -> float:
        """Return the loss of the first guess, in nats per token."""
        return sum(self._learn_part(part, len(part) / len(windows)) for part in self._passes(windows))

    def _passes(self, windows: Tensor) -> Iterable[Tensor]:
        """Return windows [rows, length] in parts, one for each pass, on the target's device."""
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        return torch.split(windows.to(self._model.device), rows_a_pass(self.plan, vocabulary))

    @torch.no_grad()
    def accuracies(self, most: int = 64) -> list[dict[int, float]]:
        """Return, for each position ahead, the fraction of held-out places at which the target's likeliest token is
        among the k likeliest guesses, by k in TOLD_RANKS. At most `most` windows are measured, evenly spread. Guesses
        follow the text's own tokens, not earlier guesses."""
        hits = defaultdict[int, Tensor](lambda: torch.zeros(max(TOLD_RANKS)))  # by position ahead: hits of each rank
        count = Counter[int]()
        for windows in self._passes(self.windows.spread(most)):
            for ahead, (guesses, best) in enumerate(self._guessed(windows)):
                hits[ahead][: guesses.shape[1]] += (guesses == best[:, None]).sum(0).cpu()
                count[ahead] += len(best)
        return [{rank: float(hits[ahead][:rank].sum()) / count[ahead] for rank in TOLD_RANKS} for ahead in hits]

    # --- files --------------------------------------------------------------------------------------

    def _write(self, out: Path) -> None:
        tensors, config = self._stored()
        stored = {name: as_stored(tensor, torch.bfloat16) for name, tensor in tensors.items()}
        replace_tensors(out / "model.safetensors", stored)
        (out / "model.safetensors").chmod(0o644)  # for services of other users; texts stay private
        replace_json(out / "config.json", {**config, "base_model_name_or_path": self.origin.target})
