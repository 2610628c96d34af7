"""Made-up reports of the speed benchmark."""

from __future__ import annotations

from typing import Any

from bench.systems.specdec import PLAIN


def measurement(name: str, rate: float, **other: Any) -> dict[str, Any]:
    return {
        "configuration": name, "kind": "code", "streams": 1, "temperature": 0.0, "round": 1, "tokens_per_second": rate,
        "first": [0.1, 0.3], "pauses": [0.01] * 9, "tokens_per_step": None, "acceptance": None, "sources": {},
        "ideal": None, "cores": {"": 1.5}, "waiting_cores": 0.0, "foreign_cores": 0.0, "text": None, **other,
    }  # fmt: skip


def report(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m", "draft": None, "dtype": "float32", "weights": "stored", "prompts": "32 tokens", "tokens": 8,
        "rounds": 2, "over": PLAIN, "temperatures": [0.0], "machine": {"cores": 2, "processor": "some"},
        "peak_bytes": {"alone": {"a": 1 << 20}}, "failed": {"vllm none": "too large"},
        "measurements": list(measurements),
        "step_times": [{"2/1": 0.001, "2/8": 0.002, "1/1": 0.003, "1/8": 0.004, "draft": 0.0005}] * 2,
    }  # fmt: skip


TWO_ROUNDS = (
    measurement(PLAIN, 100.0, cores={"verifier": 1.0, "orchestrator": 0.25}, text=0),
    measurement("specdec drafted", 150.0, ideal=200.0, text=1),
    measurement("vLLM", 80.0),
    measurement("vLLM n-gram", 120.0),
    measurement(PLAIN, 50.0, round=2, cores={"verifier": 1.0, "orchestrator": 0.25}, text=2),
    measurement("specdec drafted", 300.0, round=2, ideal=400.0, foreign_cores=0.5, text=3),
    measurement("vLLM", 100.0, round=2),
    measurement("vLLM n-gram", 100.0, round=2),
)
