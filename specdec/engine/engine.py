"""What services ask of an engine: one packed forward pass, and moving rows of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.choice import SamplingQuery
from specdec.decoding.step_logits import HostLogits, StepLogits
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import Slots


class UnsupportedModelError(Exception):
    """The model cannot run in a packed batch, and why."""


class Engine(Protocol):
    """A loaded model and its key/value memory. Used by one thread."""

    capacity: int  # slots of key/value memory
    vocabulary: int
    numerics: str  # fingerprint: equal ones give equal bits
    exact: bool  # a row's bits do not depend on its batch: checked at start
    threads: tuple[int, ...]  # numbers of them that it can compute with, the largest first, with which it starts

    def packer(self) -> Packer:
        """An empty batch in the layout this engine wants."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        """Logits [n, vocabulary] of the wanted rows; stores the keys and values of all rows."""

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy rows of key/value memory from slots to slots, in every layer."""

    def use_threads(self, count: int) -> None:
        """Compute with so many of `threads` from now on."""


@runtime_checkable
class GpuSampling(Engine, Protocol):
    """One whose logits are better left where they are."""

    def step(self, batch: PackedBatch, asked: Mapping[int, SamplingQuery]) -> StepLogits:
        """A forward pass, and the wanted rows; what is `asked` of them, by their index, is known in advance."""


Step = Callable[[PackedBatch, Callable[[], Mapping[int, SamplingQuery]]], StepLogits]
"""A forward pass and its wanted rows; what may be asked of them is worked out only for those who want to know."""


def step_of(engine: Engine) -> Step:
    """However this engine makes one."""
    if isinstance(engine, GpuSampling):
        return lambda batch, asked: engine.step(batch, asked())
    return lambda batch, _: HostLogits(engine.forward(batch))
