"""The engine's interface: one forward pass over a packed batch, and copying slots of the KV cache.

Optional features are capabilities: protocols or attributes besides `Engine`. An engine's capabilities depend on the
loaded model, so they are looked up at run time, with one function each: `launch_of`, `queues_passes`, `draft_pass_of`,
`on_cpu`, `cpu_threads`, `hidden_states`, `layer_features`, `chains_only`, `longest_text`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.draft_logits import DraftLogits, HostDraftLogits
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import HostLogits, RowFeatures, StepLogits
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import Slots
from specdec.engine.unsupported import UnsupportedModelError


class Engine(Protocol):
    """A loaded model and its KV cache. Not thread-safe: used by one thread."""

    capacity: int  # slots of the KV cache
    vocabulary: int
    numerics: str  # numerics fingerprint: equal fingerprints give equal bits
    exact: bool  # a row's bits do not depend on its batch; checked at start

    def packer(self) -> Packer:
        """Return an empty packer for this engine's layout."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        """Return the logits [n, vocabulary] of the wanted rows; store the keys and values of all rows."""

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy keys and values from slots to slots, in every layer."""


class Pass(Protocol):
    """A launched forward pass."""

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        """Wait for the pass and return its wanted rows. Called at most once. If it is never called, because no row is
        needed, the next pass raises any error of this one. `asked` computes the sampling queries known in advance, by
        index among the wanted rows. Only engines that use queries call `asked`, during the pass if the device is
        asynchronous."""


@runtime_checkable
class GpuSampling(Protocol):
    """Forward passes of an engine that keeps its logits on the GPU and samples there."""

    def launch(self, batch: PackedBatch) -> Pass:
        """Launch a forward pass. An asynchronous device computes it while the host continues."""


@dataclass(frozen=True)
class HostPass:
    """A forward pass of an engine with logits in host memory. It runs only when its logits are requested."""

    run: Callable[[PackedBatch], StepLogits]
    batch: PackedBatch

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        return self.run(self.batch)


Launch = Callable[[PackedBatch], Pass]


def launch_of(engine: Engine, *, hidden: bool = False, features: Sequence[int] = ()) -> Launch:
    """Return the function that launches a forward pass of this engine. The pass's step logits include the features of
    the layers `features`, if given, else the hidden states if `hidden`. Raises UnsupportedModelError if the engine
    lacks them."""
    if features:
        with_layers, layers = layer_features(engine), tuple(features)
        if isinstance(with_layers, GpuLayerFeatures):
            return partial(with_layers.launch_features, layers=layers)
        return partial(HostPass, lambda batch: _with_features(with_layers, batch, layers))
    if hidden:
        source = hidden_states(engine)
        if isinstance(source, GpuHiddenStates):
            return source.launch_hidden
        return partial(HostPass, lambda batch: HostLogits(*source.forward_hidden(batch)))
    if isinstance(engine, GpuSampling):
        return engine.launch
    return partial(HostPass, lambda batch: HostLogits(engine.forward(batch)))


def _with_features(engine: LayerFeatures, batch: PackedBatch, layers: Sequence[int]) -> StepLogits:
    """Run a forward pass; its step logits include the features of these layers."""
    logits, features = engine.forward_features(batch, layers)
    return HostLogits(logits, features=RowFeatures(features, batch.wanted))


def queues_passes(engine: Engine) -> bool:
    """Return whether a pass can be launched, and slots copied, while the previous pass is running. If so, the device
    executes in launch order, and a pass reads only the slots among its rows' keys."""
    return getattr(engine, "queues_passes", False)


@runtime_checkable
class Shortlisting(Protocol):
    """Draft passes of an engine that keeps its logits on the device and sends only shortlists to the host."""

    def forward_shortlists(self, batch: PackedBatch) -> DraftLogits:
        """Run a forward pass and return its wanted rows. On return, the pass is complete and its shortlists are on the
        host."""


DraftPass = Callable[[PackedBatch], DraftLogits]
"""Runs a forward pass and returns its wanted rows as draft logits."""


def draft_pass_of(engine: Engine) -> DraftPass:
    """Return the function that runs a draft's forward pass on this engine."""
    if isinstance(engine, Shortlisting):
        return engine.forward_shortlists
    return lambda batch: HostDraftLogits(engine.forward(batch))


@runtime_checkable
class Placed(Protocol):
    """An engine that reports its device, dtype and threads."""

    device: str  # cpu, cuda:0
    dtype: str
    threads: tuple[int, ...]  # possible thread counts of a pass, largest first; empty on GPUs and with vLLM


def on_cpu(engine: Engine) -> bool:
    """Return whether an engine's passes take CPU cores from the process's other work; True for engines that are not
    `Placed`."""
    return not isinstance(engine, Placed) or engine.device.startswith("cpu")


@runtime_checkable
class CpuThreads(Protocol):
    """An engine whose CPU thread count can change between two passes."""

    threads: tuple[int, ...]  # possible thread counts, largest (the initial one) first

    def use_threads(self, count: int) -> None:
        """Use `count` threads, one of `threads`, in the following passes."""


def chains_only(engine: Engine) -> bool:
    """Return whether a batch's rows of a text must form one chain at its end, in the text's own blocks, without side
    branches or tree slots. True for paged attention with one block table per text."""
    return getattr(engine, "chains_only", False)


def longest_text(engine: Engine) -> int | None:
    """Return the length in tokens of the longest text an engine can compute; None: only the KV cache limits it."""
    return getattr(engine, "longest_text", None)


def cpu_threads(engine: Engine) -> CpuThreads | None:
    """Return the engine if its thread count can change; None otherwise, as on a GPU."""
    return engine if isinstance(engine, CpuThreads) else None


@runtime_checkable
class LazyMemory(Protocol):
    """KV memory that the system allocates at the first write, which slows down that step."""

    @property
    def lazy_bytes(self) -> int:
        """Bytes of this memory, allocated or not."""

    def touch_memory(self) -> None:
        """Have the system allocate all of this memory. May run in a separate thread, during passes."""


def touch_memory(engines: Iterable[Engine]) -> None:
    """Have the system allocate the KV memory of engines with lazy memory, one engine at a time, in a thread that runs
    during their passes."""
    lazy = [engine for engine in engines if isinstance(engine, LazyMemory)]
    if not lazy:
        return

    def touch() -> None:
        for engine in lazy:
            engine.touch_memory()

    threading.Thread(target=touch, name="touch-memory", daemon=True).start()


@runtime_checkable
class HiddenStates(Protocol):
    """Hidden states of an engine, for heads and drafters that build on the target's states (Medusa, EAGLE)."""

    hidden_size: int

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run a forward pass like `forward`. Return the logits, with the same bits, and the hidden states [n,
        hidden_size] of the same rows: the input of the output head, after the last norm. They are float32, converted
        losslessly from a narrower dtype."""

    def output_head(self, hidden: Any) -> Any:
        """Return the logits, float32 [n, vocabulary], of any number of hidden states [n, hidden_size], before any
        processing that follows the output head. All tensors are on the engine's device."""


@runtime_checkable
class GpuHiddenStates(Protocol):
    """Hidden states that stay on the GPU, with logits that are sampled there."""

    def launch_hidden(self, batch: PackedBatch) -> Pass:
        """Launch a forward pass like `GpuSampling.launch`; its step logits include hidden states."""


def hidden_states(engine: Engine) -> HiddenStates:
    """Return the engine as a source of hidden states; UnsupportedModelError if it has none."""
    if isinstance(engine, HiddenStates):
        return engine
    raise UnsupportedModelError(f"{type(engine).__name__} returns no hidden states with logits; use --engine torch")


@runtime_checkable
class LayerFeatures(Protocol):
    """Features of an engine: the residual stream entering its model's layers, for drafters that read several depths of
    the target (EAGLE-3) or its last states (MTP). Also the token embeddings, which these drafters share."""

    def layer_count(self) -> int:
        """Return the number of layers that have features; UnsupportedModelError if the layers cannot be found."""

    def forward_features(
        self, batch: PackedBatch, layers: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run a forward pass like `forward`. Return the logits, with the same bits, and the residual stream [t,
        len(layers), d] entering each of these layers, before its norm. The features cover *all* t rows of the batch,
        since drafters read the prompt too. Layer 0 reads the embedded tokens; layer `layer_count()` stands for the
        states after the last norm. Features are float32, converted losslessly from a narrower dtype."""

    def token_embeddings(self) -> Any:
        """Return the table of token embeddings, a tensor [ids, width] on the engine's device."""


@runtime_checkable
class GpuLayerFeatures(Protocol):
    """Features that stay on the GPU, with logits that are sampled there."""

    def launch_features(self, batch: PackedBatch, layers: Sequence[int]) -> Pass:
        """Launch a forward pass like `GpuSampling.launch`; its step logits include the features of these layers."""


def layer_features(engine: Engine) -> LayerFeatures:
    """Return the engine as a source of features; UnsupportedModelError if it has none."""
    if isinstance(engine, LayerFeatures):
        return engine
    raise UnsupportedModelError(
        f"{type(engine).__name__} does not return the inputs of its layers, which these heads read; use --engine torch"
    )
