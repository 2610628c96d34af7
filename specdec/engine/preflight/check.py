"""The single entry point of all checks before a start: of each model, of its device, and of all models together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.engine.gguf_file import open_model
from specdec.engine.memory import free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Dtype, Placement
from specdec.engine.preflight.architectures import check_architecture
from specdec.engine.preflight.device import check_placement, is_exported
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.memory_needed import MemoryNeeded, in_gigabytes, memory_needed
from specdec.engine.preflight.quantisation import check_quantisation
from specdec.engine.preflight.weights import check_weights
from specdec.engine.unsupported import UnsupportedModelError

HeadsOf = Callable[[ModelDirectory, Placement, int | None], MemoryNeeded]
"""Checks heads against their target, and returns the memory of a draft service that runs them with this placement; the
last argument is as in `memory_needed`."""


class Wanted(NamedTuple):
    """A model to be served, and how. With `heads`, a draft service runs only these, and the model is their target."""

    path: Path
    placement: Placement = Placement()
    translates: bool = False  # a draft that may have another tokenizer than its target
    heads: HeadsOf | None = None

    def memory_needed(self, directory: ModelDirectory, free: int | None = None) -> MemoryNeeded:
        """Return the memory needed, as by the function `memory_needed`; `directory`: the model's."""
        if self.heads is not None:
            return self.heads(directory, self.placement, free)
        return memory_needed(directory, self.placement, free)


Beside = Callable[[ModelDirectory, Dtype, int | None], MemoryNeeded]
"""Checks anything that runs beside a target on its device, such as heads, given the target, its dtype and the tokens of
its KV cache (None: the minimum). Returns the memory that it needs."""


def check(target: Wanted, *drafts: Wanted, beside: Beside | None = None) -> list[ModelDirectory]:
    """Return the models' directories if this machine can serve all models together with anything that runs `beside` the
    target, and if every draft fits the target.

    Raises ModelDirectoryError or UnsupportedModelError, naming in one line the problem and the remedy, or
    ModuleNotFoundError for a missing package. Reads no weights, and imports neither torch nor transformers.
    """
    directories = [check_model(wanted) for wanted in (target, *drafts)]
    for wanted, draft in zip(drafts, directories[1:], strict=True):
        if not wanted.translates:
            draft.check_pair(directories[0])
    further = []
    if beside is not None:
        further.append(beside(directories[0], dtype_of(directories[0], target.placement), target.placement.kv_tokens))
    check_memory((target, *drafts), directories, further)
    return directories


def check_model(wanted: Wanted) -> ModelDirectory:
    """Return a model's directory if the model, or its heads, can be served, considered alone."""
    directory = open_model(wanted.path)
    if wanted.heads is not None:
        check_placement(directory, wanted.placement)
        wanted.memory_needed(directory)
        return directory
    by_transformers = wanted.placement.kind != "vllm" and not is_exported(directory, wanted.placement)
    check_weights(directory, by_transformers=by_transformers)
    dtype_of(directory, wanted.placement)
    check_placement(directory, wanted.placement)
    if by_transformers:  # vLLM and exporters do their own checks
        check_architecture(directory)
        check_quantisation(directory, wanted.placement.device)
    return directory


def is_counted(placement: Placement) -> bool:
    """Return whether a model's memory needs are known; for vLLM on GPUs, vLLM decides them."""
    return placement.kind != "vllm" or placement.device == "cpu"


def device_of(placement: Placement) -> str:
    """Return the full name of a placement's device."""
    return "cuda:0" if placement.device == "cuda" else placement.device


def check_memory(
    models: Sequence[Wanted], directories: Sequence[ModelDirectory], further: Sequence[MemoryNeeded] = ()
) -> None:
    """Raise UnsupportedModelError unless each device has room for all models placed on it, and the first model's device
    also for the `further` needs. Models that vLLM runs on GPUs are not counted: vLLM checks them itself, since its
    options decide quantisation and the number of GPUs."""
    on_device: dict[str, list[MemoryNeeded]] = defaultdict(list)
    if further:
        on_device[device_of(models[0].placement)] += further
    for model, directory in zip(models, directories, strict=True):
        if is_counted(model.placement):
            on_device[device_of(model.placement)].append(model.memory_needed(directory))
    for device, needs in on_device.items():
        free, needed = free_bytes(device), sum(need.total for need in needs)
        if needed > free:
            raise UnsupportedModelError(
                f"{'; '.join(map(str, needs))}: together {in_gigabytes(needed)}, but {device} has "
                f"{in_gigabytes(free)} free: {' or '.join(dict.fromkeys(need.remedy for need in needs))}"
            )
