"""The resolved request: what a client needs to have the text resumed elsewhere with the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from orchestrator.requests.reasoning import reasoning_message
from orchestrator.requests.sample import Sample
from specdec.v2 import generation_pb2


def digest(tokens: Sequence[int]) -> str:
    """Return the SHA-256, in hex, over tokens of four bytes each (little-endian)."""
    return hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).hexdigest()


def resolved(sample: Sample, model: str) -> generation_pb2.ResolvedRequest:
    """Return the resolved request of a sample. `model` names its revision; empty if there is no other."""
    sampling = sample.sampling
    message = generation_pb2.ResolvedRequest(
        model=model,
        sampling=generation_pb2.SamplingParameters(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
        ),
        max_tokens=sample.max_tokens,
        end_tokens=sorted(sample.end_tokens),
        prompt_digest=digest(sample.prompt),
        reasoning=reasoning_message(sample.reasoning),
    )
    if sample.time is not None:
        message.time.FromDatetime(sample.time)
    return message
