"""Steps of transformers: its forward pass in three ways, and its continuous batching."""

from __future__ import annotations

import contextlib
import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.utils import logging as transformers_logging

from bench.engine.device import Device
from bench.engine.shapes import Combination
from bench.systems.transformers_batching import results
from specdec.engine.hf.pretrained import DTYPES
from specdec.engine.hf.random_weights import RandomWeights

PEERS = ("eager-dynamic", "eager-static", "compiled", "continuous-batching")
PAGE_TOKENS = 256
BATCHED_TOKENS = 24
"""Tokens decoded by transformers' continuous batching in a measurement; the first half is left out."""


class _Transformers(ABC):
    """transformers' forward pass with a cache and `sdpa` attention, the fastest implementation available everywhere."""

    repeated = True

    def __init__(self, model: PreTrainedModel, device: Device) -> None:
        self._model = model
        self._device = device
        self._cache: Any = None
        self._for: Combination | None = None

    def step(self, what: Combination) -> tuple[float, float]:
        if what != self._for:
            self._cache, self._for = None, what  # both caches might not fit into memory
            with torch.inference_mode():
                self._cache = self._filled(what)
        tokens = torch.ones(what.sessions, what.tokens, dtype=torch.int64, device=self._device.name)
        positions = torch.arange(what.context, what.context + what.tokens, device=self._device.name)
        positions = positions.expand(what.sessions, -1).contiguous()

        def run() -> None:
            self._forward(input_ids=tokens, position_ids=positions, past_key_values=self._cache, use_cache=True)

        with torch.inference_mode():
            times = self._device.timed(run)
            self._take_back(what)
        return times

    def _forward(self, **inputs: Any) -> object:
        return self._model(**inputs)

    @abstractmethod
    def _filled(self, what: Combination) -> Any:
        """Return a cache with the texts."""

    @abstractmethod
    def _take_back(self, what: Combination) -> None:
        """Remove the tokens of a step from the cache."""

    def _shape(self) -> tuple[int, int, int]:
        """Return the number of layers, of key/value heads, and the width of a head."""
        config = self._model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, config.num_key_value_heads, width


class EagerDynamic(_Transformers):
    """transformers' forward pass with the default cache of `generate`, which grows by copying."""

    name = "eager-dynamic"

    def _filled(self, what: Combination) -> DynamicCache:
        layers, heads, width = self._shape()
        cache = DynamicCache(config=self._model.config)
        place: dict[str, Any] = {"dtype": self._model.dtype, "device": self._device.name}
        for layer in range(layers):
            cache.update(
                torch.zeros(what.sessions, heads, what.context, width, **place),
                torch.zeros(what.sessions, heads, what.context, width, **place),
                layer,
            )
        return cache

    def _take_back(self, what: Combination) -> None:
        self._cache.crop(-what.tokens)


class EagerStatic(_Transformers):
    """transformers' forward pass with a cache of fixed size, written in place and masked."""

    name = "eager-static"

    def _filled(self, what: Combination) -> StaticCache:
        _, heads, width = self._shape()
        cache = StaticCache(config=self._model.config, max_cache_len=what.context + what.tokens)
        place = torch.device(self._device.name)
        cache.early_initialization(what.sessions, heads, width, self._model.dtype, place)
        self._reset(cache, what)
        return cache

    def _take_back(self, what: Combination) -> None:
        self._reset(self._cache, what)

    @staticmethod
    def _reset(cache: StaticCache, what: Combination) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(what.context)


class Compiled(EagerStatic):
    """`EagerStatic` with torch.compile, compiled for every combination; on CUDA with graphs, so that the host has
    little to do."""

    name = "compiled"

    def _filled(self, what: Combination) -> StaticCache:
        torch._dynamo.reset()  # beyond a number of compilations torch silently runs a function uncompiled
        mode = "reduce-overhead" if self._device.kind == "cuda" else None
        self._compiled: Any = torch.compile(self._model.forward, mode=mode, dynamic=False)
        return super()._filled(what)

    def _forward(self, **inputs: Any) -> object:
        return self._compiled(**inputs)


class ContinuousBatching:
    """transformers' continuous batching, which computes the prompts, too. The time between two tokens of a stream
    counts as a step's time; the host does not regain control in between."""

    name = "continuous-batching"
    repeated = False  # one call measures many steps

    def __init__(self, model: PreTrainedModel, device: Device) -> None:
        self._model = model
        self._device = device

    def step(self, what: Combination) -> tuple[float, float]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        pages = what.sessions * (-(-(what.context + BATCHED_TOKENS) // PAGE_TOKENS) + 1)
        manager: Any = self._model.init_continuous_batching(
            GenerationConfig(eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                max_requests_per_batch=what.sessions, num_blocks=pages, page_size=PAGE_TOKENS, allow_block_sharing=False
            ),
        )
        manager.start()
        try:
            prompts = [[1 + session] * what.context for session in range(what.sessions)]
            ids = manager.add_requests(prompts, max_new_tokens=BATCHED_TOKENS, record_timestamps=True)
            arrivals = [result.timestamps for result in results(manager, ids)]
        finally:
            manager.stop(block=True)
        gap = statistics.median(np.diff(max(arrivals))[BATCHED_TOKENS // 2 :].tolist())
        return gap, gap


KINDS: dict[str, type[EagerDynamic] | type[EagerStatic] | type[Compiled] | type[ContinuousBatching]] = {
    kind.name: kind for kind in (EagerDynamic, EagerStatic, Compiled, ContinuousBatching)
}


@contextlib.contextmanager
def transformers_model(directory: RandomWeights, dtype: str, device: Device) -> Iterator[PreTrainedModel]:
    """Yield the model with random weights; it is freed when the context exits."""
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    config = AutoConfig.from_pretrained(directory.path, local_files_only=True)
    with torch.device(device.name):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()
    try:
        yield model
    finally:
        del model
        device.free()
