"""The engine's interface: one forward pass over a packed batch, and copying rows of the KV cache.

What only some engines can do is a capability: a protocol of its own beside `Engine`. Which ones an engine has depends
on what was loaded, so this is found out at run time, in one function for each: `step_of`, `draft_pass_of`,
`cpu_threads`, `hidden_states`, `chains_only`, `longest_text`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.draft_logits import DraftLogits, HostDraftLogits
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import HostLogits, StepLogits
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import Slots
from specdec.engine.unsupported import UnsupportedModelError as UnsupportedModelError


class Engine(Protocol):
    """A loaded model and its KV cache. Used by one thread."""

    capacity: int  # slots of the KV cache
    vocabulary: int
    numerics: str  # numerics fingerprint: equal ones give equal bits
    exact: bool  # a row's bits do not depend on its batch: checked at start

    def packer(self) -> Packer:
        """Return an empty packer for the layout that this engine reads."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        """Return the logits [n, vocabulary] of the wanted rows; store the keys and values of all rows."""

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy keys and values from slots to slots, in every layer."""


@runtime_checkable
class GpuSampling(Protocol):
    """Steps of an engine whose logits stay on the GPU, which samples from them there."""

    def step(self, batch: PackedBatch, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        """Run a forward pass and return its wanted rows. `asked` works out the sampling queries known in advance, by
        the index of their row among the wanted ones: while the device computes, if it does so by itself."""


Step = Callable[[PackedBatch, Callable[[], Mapping[int, SamplingQuery]]], StepLogits]
"""A function that runs a forward pass and returns its wanted rows. Its second argument works out the rows' sampling
queries; it is called only for engines that use them in advance."""


def step_of(engine: Engine) -> Step:
    """Return the function that runs a step of this engine."""
    if isinstance(engine, GpuSampling):
        return engine.step
    return lambda batch, _: HostLogits(engine.forward(batch))


@runtime_checkable
class Shortlisting(Protocol):
    """Passes for a draft on an engine whose logits stay on its device, which sends shortlists of them."""

    def forward_shortlists(self, batch: PackedBatch) -> DraftLogits:
        """Run a forward pass and return its wanted rows. The pass is over, and their shortlists are on the host."""


DraftPass = Callable[[PackedBatch], DraftLogits]
"""A function that runs a forward pass and returns its wanted rows as a draft reads them."""


def draft_pass_of(engine: Engine) -> DraftPass:
    """Return the function that runs a draft's pass of this engine."""
    if isinstance(engine, Shortlisting):
        return engine.forward_shortlists
    return lambda batch: HostDraftLogits(engine.forward(batch))


@runtime_checkable
class Placed(Protocol):
    """Where an engine computes and in what, for people to read."""

    device: str  # cpu, cuda:0
    dtype: str
    threads: tuple[int, ...]  # CPU threads of a pass: each number that they may have, the largest first; none: no CPU


@runtime_checkable
class CpuThreads(Protocol):
    """The CPU threads that an engine computes with, whose number can be changed between two passes."""

    threads: tuple[int, ...]  # thread counts it can compute with, the largest first: the one it starts with

    def use_threads(self, count: int) -> None:
        """Compute with `count` threads, one of `threads`, from now on."""


def chains_only(engine: Engine) -> bool:
    """Return whether a text's rows must be one chain at its end, in blocks of its own: there are no side branches, and
    no rows beside the text. True of paged attention, which has one block table for each text."""
    return getattr(engine, "chains_only", False)


def longest_text(engine: Engine) -> int | None:
    """Return the tokens of the longest text that an engine can compute; None: as many as its KV cache has slots."""
    return getattr(engine, "longest_text", None)


def cpu_threads(engine: Engine) -> CpuThreads | None:
    """Return the engine as what changes the number of its threads; None if it cannot, as on a GPU."""
    return engine if isinstance(engine, CpuThreads) else None


@runtime_checkable
class LazyMemory(Protocol):
    """KV memory that the system hands out where it is first written, which takes a part of a step's time."""

    @property
    def lazy_bytes(self) -> int:
        """Bytes of it, handed out or not."""

    def touch_memory(self) -> None:
        """Have it hand out all of it. For a thread of its own: passes can be made meanwhile."""


def touch_memory(engines: Iterable[Engine]) -> None:
    """Have the system hand out the KV memory of those engines that are lazy about it, one after the other, in a thread
    beside their passes."""
    lazy = [each for each in engines if isinstance(each, LazyMemory)]
    if not lazy:
        return

    def touch() -> None:
        for each in lazy:
            each.touch_memory()

    threading.Thread(target=touch, name="touch-memory", daemon=True).start()


@runtime_checkable
class HiddenStates(Protocol):
    """Hidden states of an engine, which heads and drafters that go on from the target's states read (Medusa, EAGLE)."""

    hidden_size: int

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run a forward pass like `forward`. Return the logits, which have the same bits, and the hidden states
        [n, hidden_size] of the same rows: what the output head reads, after the last norm. They are float32, into which
        the numbers of a narrower dtype are converted without loss."""


def hidden_states(engine: Engine) -> HiddenStates:
    """Return the engine as what gives hidden states; UnsupportedModelError if it gives none."""
    if isinstance(engine, HiddenStates):
        return engine
    raise UnsupportedModelError(
        f"{type(engine).__name__} gives no hidden states beside logits; --engine torch without --compile does"
    )
