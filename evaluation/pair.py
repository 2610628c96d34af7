"""A target and a draft, loaded and timed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from draft_service.pass_times import Width, measured_width
from draft_service.request import ExpansionPolicy
from evaluation.pace import Pace
from orchestrator.requests.model import ServedModel
from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import GRAPH, ModelDirectory
from specdec.engine.placement import Kind, Placement, WantedDtype
from specdec.engine.preflight.check import Wanted, check
from verifier_service.costs.step_latency import StepLatency, step_seconds


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded: engine, device, threads and dtype."""

    engine: Kind = "torch"
    device: str = "cpu"
    threads: int = 1
    dtype: WantedDtype = "auto"
    is_draft: bool = False

    def placement(self, kv_tokens: int) -> Placement:
        return Placement(self.engine, self.dtype, self.device, kv_tokens, is_draft=self.is_draft)


class LoadedModel:
    """A loaded model, with the measured latency of its passes, and their pace during the evaluation."""

    def __init__(
        self, directory: ModelDirectory, options: EngineOptions, kv_tokens: int, *, exact: bool = False
    ) -> None:
        self.directory = directory
        placement = options.placement(kv_tokens)
        self.engine = load_engine(directory, placement, threads=(options.threads,), exact=exact)
        self.latency = StepLatency.measure(self.engine, self.engine.capacity)
        self.pace = Pace(partial(step_seconds, self.engine), self.latency.of)


class Pair:
    """A target and a draft to serve together. The draft is loaded twice: as in a draft service and, unless it is an
    export, as a local draft of the verifier."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        target_options: EngineOptions,
        draft_options: EngineOptions,
        kv_tokens: int = 16384,
        candidates: int = 0,
    ) -> None:
        """Load both, with KV caches of `kv_tokens` tokens, and room for `candidates` more at the draft.
        ModelDirectoryError or UnsupportedModelError, with a message of one line, if they cannot be used."""
        of_draft = kv_tokens + candidates
        draft_options = replace(draft_options, is_draft=True)  # quantised where a draft service would quantise
        wanted = [Wanted(target, target_options.placement(kv_tokens)), Wanted(draft, draft_options.placement(of_draft))]
        self.has_local_draft = not (draft / GRAPH).exists()  # an export is for draft services only
        if self.has_local_draft:
            wanted.append(Wanted(draft, target_options.placement(kv_tokens)))
        directory, small, *_ = check(*wanted)
        self.model = ServedModel.of(directory)
        self.target = LoadedModel(directory, target_options, kv_tokens, exact=True)
        self.draft = LoadedModel(small, draft_options, of_draft)
        self._target_options, self._kv_tokens = target_options, kv_tokens

    def measure_pace(self) -> None:
        """Measure the pace of both models once more, between two runs."""
        for model in (self.target, self.draft):
            model.pace.measure()

    @property
    def spread(self) -> float:
        """The larger of the two models' spreads of pass times."""
        return max(self.target.pace.spread, self.draft.pace.spread)

    @cached_property
    def local_draft(self) -> LoadedModel:
        """The draft, loaded with the target's engine options."""
        return LoadedModel(self.draft.directory, self._target_options, self._kv_tokens)

    @cached_property
    def width(self) -> Width:
        """The number of nodes that a draft service computes in a pass."""
        return measured_width(self.draft.engine, self.draft.directory.context, ExpansionPolicy().max_branches)
