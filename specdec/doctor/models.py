"""Checks whether models can be served here: the same checks as at a service's start."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specdec.engine import hub
from specdec.engine.heads.kinds import kind_in, memory_of_heads
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.preflight.device import is_exported
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.memory_needed import MemoryNeeded, memory_needed
from specdec.engine.preflight.memory_table import memory_of
from specdec.engine.preflight.quantisation import quantised_by
from specdec.engine.unsupported import UnsupportedModelError
from specdec.extras import hint
from specdec.roles import load


class Found(NamedTuple):
    """A model that can be served here."""

    role: str
    path: Path
    architecture: str
    context: int  # tokens
    dtype: str
    device: str
    memory: int | None  # bytes, with the full KV cache and the maximum number of sessions; None: vLLM decides
    memory_at_least: int | None  # bytes needed to start; None: vLLM decides
    memory_parts: MemoryNeeded | None  # of `memory`
    tensors_checked: bool = False  # names and shapes of the tensors in the weight files, against the model's
    common_tokens: int | None = None  # with the target, if a draft has another tokenizer

    def as_json(self) -> dict[str, Any]:
        parts = None if self.memory_parts is None else asdict(self.memory_parts)
        return {**self._asdict(), "path": str(self.path), "memory_parts": parts}


class ModelCheck(NamedTuple):
    """The requested models, if all can be served together, else the problem."""

    found: list[Found]
    problem: str


def models(target: Path | None, draft: Path | None, placement: Placement, heads: Path | None = None) -> ModelCheck:
    """Check a target, and its heads, as a verifier with this placement would, and a draft as a draft service would by
    default."""
    if heads is not None and placement.kind in ("vllm", "onnx"):
        return ModelCheck([], f"--heads: {placement.kind} gives no hidden states; use --engine torch")
    beside = None if heads is None else partial(memory_of_heads, heads)
    wanted = {}
    if target is not None:
        wanted["target"] = Wanted(target, placement)
    if draft is not None:
        wanted["draft"] = Wanted(draft, Placement("onnx", is_draft=True), translates=True)
    try:
        directories = check(*wanted.values(), beside=beside)
        if target is not None:
            from specdec.text.check import check_text  # imports packages that may be missing

            check_text(directories[0])
        opened = dict(zip(wanted, directories, strict=True))
        needed = memory_of({role: (wanted[role], directory) for role, directory in opened.items()}, heads=beside)
        found = [_found(role, wanted[role].placement, opened[role], needed.get(role)) for role in wanted]
        if "target" in opened and "draft" in opened:
            found[-1] = found[-1]._replace(common_tokens=_common_tokens(opened["draft"], opened["target"]))
        if heads is not None:
            its = needed["heads"]
            found.insert(
                1,
                found[0]._replace(
                    role="heads",
                    path=heads,
                    architecture=kind_in(heads).architecture,
                    memory=its.total,
                    memory_at_least=its.total,
                    memory_parts=its,
                    tensors_checked=True,  # with their memory
                ),
            )
        return ModelCheck(found, "")
    except (ModelDirectoryError, UnsupportedModelError) as error:
        return ModelCheck([], str(error))
    except ModuleNotFoundError as error:
        role = "draft" if target is None else "verifier"
        return ModelCheck([], hint(error, role) or str(error))


def _common_tokens(draft: ModelDirectory, target: ModelDirectory) -> int | None:
    """Return the number of tokens that a draft with another tokenizer shares with its target; None if the tokenizers
    are equal. UnsupportedModelError if the draft cannot be used with this target."""
    if draft.tokenizer_fingerprint == target.tokenizer_fingerprint:
        return None
    return len(load("draft_service.translation").Translation(draft, target).common)


def _check_tensors(directory: ModelDirectory, placement: Placement) -> bool:
    """Raise as a service's start would for tensors that are missing or have other shapes. Return False if only the
    start can check them: the library is missing or broken, the weights are quantised, or transformers does not load
    them."""
    if placement.kind == "vllm" or is_exported(directory, placement) or quantised_by(directory) is not None:
        return False
    hub.disable()
    try:
        from specdec.engine.hf.pretrained import check_tensors  # imports torch and transformers
    except Exception:  # a broken installation may raise anything
        return False
    check_tensors(directory)
    return True


def _found(role: str, placement: Placement, directory: ModelDirectory, needed: MemoryNeeded | None) -> Found:
    return Found(
        role,
        directory.path,
        directory.model_type,
        directory.context,
        dtype_of(directory, placement),
        placement.device,
        None if needed is None else needed.total,
        None if needed is None else memory_needed(directory, placement).total,
        needed,
        _check_tensors(directory, placement),
    )
