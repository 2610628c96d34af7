"""Samples of a small model, as `parse` would make them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from orchestrator.generation.sample_context import GrantedLimits, SampleContext
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.requests.sample import CommittedText, PromptTokens, Sample
from orchestrator.text.request_timeline import SampleTimeline
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import SpeculationOptions
from specdec.serving.messages import sampling_message
from specdec.serving.timeline import Timeline
from specdec.v2 import model_pb2

VOCABULARY, CONTEXT, END = 50, 40, 7
PROMPT = [1, 2, 3]

MODEL = ServedModel("m", SimpleNamespace(), "", CONTEXT, VOCABULARY, frozenset({END}))  # type: ignore[arg-type]


def sample(**fields: Any) -> Sample:
    usual: dict[str, Any] = {
        "index": 0,
        "prompt": PROMPT,
        "generated": [],
        "sampling": Sampling(),
        "max_tokens": 20,
        "min_tokens": 0,
        "end_tokens": frozenset({END}),
        "stop": (),
        "top_logprobs": None,
        "speculation": SpeculationOptions(),
        "tenant": "",
        "rule": Rule.COUPLED,
        "contrast": model_pb2.Contrast(),
        "typicality": model_pb2.Typicality(),
    }
    given = usual | fields
    given["prompt"] = PromptTokens(given["prompt"])
    return Sample(sampling_message=sampling_message(replace(given["sampling"], seed=0)), **given)


def context(peers: Peers | None = None, **fields: Any) -> SampleContext:
    """Return the context of a sample with these fields and no deadline."""
    wanted = sample(**fields)
    text, granted = CommittedText(wanted), GrantedLimits(wanted.speculation)
    timeline = SampleTimeline(Timeline(), Counter())
    return SampleContext(wanted, MODEL, peers or Peers(Pods()), None, text, granted, timeline)
