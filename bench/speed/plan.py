"""The plan of a comparison: the systems to start, and the cells in which all configurations are measured."""

from __future__ import annotations

from dataclasses import dataclass

from bench.speed.config import SpeedConfig
from bench.systems import (
    bad_drafts,
    llama_cpp,
    specdec,
    transformers_batching,
    transformers_generate,
    vllm,
    vllm_verifier,
)
from bench.systems.system import Launch
from demo.prompts import MIXED


@dataclass(frozen=True)
class Cell:
    """A cell of the comparison: the load of all configurations in a round."""

    kind: str
    streams: int
    temperature: float


def launches(config: SpeedConfig) -> list[Launch]:
    """Return the systems under test, each with its configurations, in the order of their turns."""
    setup = config.setup
    found = specdec.launches(setup, config.windows, config.heads)
    if config.bad_drafts:
        found += bad_drafts.launches(setup)
    if config.transformers:
        found += transformers_generate.launches(setup) + transformers_batching.launches(setup)
    if config.vllm_python is not None:
        found += vllm.launches(setup, config.vllm_python) + vllm_verifier.launches(setup, config.vllm_python)
    if config.llama is not None:
        found += llama_cpp.launches(setup, config.llama)
    plain, *others = found  # the baseline first
    return [plain, *(each for each in others if any(word in each.name for word in config.only))]


def cells(config: SpeedConfig) -> list[Cell]:
    return [
        Cell(kind, streams, temperature)
        for temperature in config.temperatures
        for streams in config.streams
        for kind in (config.kinds if streams == 1 else [MIXED])
    ]
