"""Which models are supported in vLLM, by the properties of its runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.engine.kv.blocks import BLOCK
from specdec.engine.vllm.fit import rope_factors, why_unfit


def group(**spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec))


def runner(model: dict[str, Any] | None = None, groups: Any = None, size: int = BLOCK, **own: Any) -> Any:
    """Return a fake runner of an ordinary model, except for the given properties."""
    config = {"is_encoder_decoder": False, "is_hybrid": False, "rswa_window": None} | (model or {})
    return SimpleNamespace(
        model_config=SimpleNamespace(**config),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group(non_causal=False)] if groups is None else groups),
        cache_config=SimpleNamespace(block_size=size),
        **{"uses_mrope": False, "supports_mm_inputs": False, "lookback_token_ids": None} | own,
    )


@pytest.mark.parametrize(
    ("unfit", "said"),
    [
        (runner({"is_encoder_decoder": True}), "it has an encoder"),
        (runner(uses_mrope=True), "several positions each (M-RoPE)"),
        (runner(supports_mm_inputs=True), "embeddings of media other"),
        (runner({"is_hybrid": True}), "state other than keys and values"),
        (runner(groups=[group(), group()]), "state other than keys and values"),
        (runner(groups=[]), "state other than keys and values"),
        (runner(groups=[group(non_causal=True)]), "prompt rows attend to later rows"),
        (runner(groups=[group(kv_cache_specs={"0": SimpleNamespace(non_causal=True)})]), "attend to later rows"),
        (runner({"rswa_window": 128}), "window depends on the end of the prompt"),
        (runner(lookback_token_ids=object()), "its layers read earlier tokens"),
        (runner(size=BLOCK + 1), f"blocks of {BLOCK + 1} tokens, which must divide {BLOCK}"),
    ],
)
def test_each_cause_is_named(unfit: Any, said: str) -> None:
    why = why_unfit(unfit)
    assert why is not None
    assert said in why


def test_an_ordinary_model_fits() -> None:
    assert why_unfit(runner()) is None
    assert why_unfit(runner(groups=[group()], size=BLOCK // 4)) is None
    older = runner()
    del older.lookback_token_ids, older.model_config.rswa_window
    assert why_unfit(older) is None


def test_it_is_told_which_factors_scale_positions() -> None:
    def model(*parts: Any) -> Any:
        return SimpleNamespace(modules=lambda: iter((object(), *parts)))

    long, short = SimpleNamespace(use_long_rope=True), SimpleNamespace(use_long_rope=False)
    assert rope_factors(model()) == []
    assert rope_factors(model(long, long)) == ["long-rope"]
    assert rope_factors(model(short)) == ["short-rope"]
