"""Checks that a model loaded by vLLM can run in passes over rows (`worker.py`), with results independent of other rows.

vLLM is not imported: its model runner is duck-typed.
"""

from __future__ import annotations

from typing import Any

from specdec.engine.kv.blocks import BLOCK


def why_unfit(runner: Any) -> str | None:
    """Return why the model of vLLM's runner cannot run in passes over rows; None if it can."""
    model, groups, size = runner.model_config, runner.kv_cache_config.kv_cache_groups, runner.cache_config.block_size
    causes = (
        (model.is_encoder_decoder, "it has an encoder"),
        (runner.uses_mrope, "its tokens have several positions each (M-RoPE)"),
        # Such a model's graphs and compiled layers take embeddings as input.
        (runner.supports_mm_inputs, "its layers take embeddings of media other than text"),
        (model.is_hybrid or len(groups) != 1, "its layers have state other than keys and values of tokens"),
        # Attention would depend on where the prompt is cut or ends, which passes do not know.
        (any(map(_sees_ahead, groups)), "prompt rows attend to later rows (prefix-LM attention)"),
        (getattr(model, "rswa_window", None) is not None, "its attention window depends on the end of the prompt"),
        (getattr(runner, "lookback_token_ids", None) is not None, "its layers read earlier tokens of the text"),
        (BLOCK % size, f"its attention needs blocks of {size} tokens, which must divide {BLOCK}"),
    )
    return next((why for found, why in causes if found), None)


def rope_factors(model: Any) -> list[str]:
    """Return the LongRoPE scaling of a model's positions, "long-rope" or "short-rope"; an empty list for other models.
    vLLM chooses it once, by the longest text that fits, and tokens depend on the choice."""
    found = {module.use_long_rope for module in model.modules() if hasattr(module, "use_long_rope")}
    return sorted("long-rope" if long else "short-rope" for long in found)


def _sees_ahead(group: Any) -> bool:
    """Return whether the attention of a group of layers is not causal."""
    spec = group.kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", {})  # present if they differ
    return any(getattr(layer, "non_causal", False) for layer in (spec, *layers.values()))
