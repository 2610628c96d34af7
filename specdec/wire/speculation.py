"""The names that clients and operators write for drafters, sets of drafters and scorers.

A new drafter in the contract needs a line in `DRAFTERS`, its name in the two literals, and a `CandidateSource`
(`tests/wire/test_speculation.py`). CONTRIBUTING.md lists what else it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from specdec.v2.generation_pb2 import Speculation
from specdec.v2.model_pb2 import (
    DRAFT_SCORER_CALIBRATED,
    DRAFT_SCORER_PROBABILITY,
    DRAFTER_HEADS,
    DRAFTER_LOCAL_MODEL,
    DRAFTER_LOOKAHEAD,
    DRAFTER_NGRAM,
    DRAFTER_REMOTE,
    Drafter,
    DraftScorer,
)

DrafterName = Literal["remote", "ngram", "lookahead", "local_model", "heads"]

SpeculationName = Literal[
    "auto", "off", "always", "draft", "local", "ngram", "lookahead", "local_model", "heads", "jacobi"
]
"""Named sets of drafters. `auto` is the verifier's default; `off` means none; `local` means all except draft services;
`draft` and `always` mean only draft services, `always` even at a loss. The other names mean a single drafter; `jacobi`
is the lookahead drafter with n-grams of 2 tokens."""

ScorerName = Literal["calibrated", "probability"]

DRAFTERS: Mapping[str, Drafter.ValueType] = {
    "remote": DRAFTER_REMOTE,
    "ngram": DRAFTER_NGRAM,
    "lookahead": DRAFTER_LOOKAHEAD,
    "local_model": DRAFTER_LOCAL_MODEL,
    "heads": DRAFTER_HEADS,
}

SCORERS: Mapping[str, DraftScorer.ValueType] = {
    "calibrated": DRAFT_SCORER_CALIBRATED,
    "probability": DRAFT_SCORER_PROBABILITY,
}

_OWN = {name: number for name, number in DRAFTERS.items() if number != DRAFTER_REMOTE}

SPECULATIONS: Mapping[str, Speculation] = {
    "auto": Speculation(),
    "off": Speculation(off=True),
    "always": Speculation(drafters=[DRAFTER_REMOTE], forced=True),
    "draft": Speculation(drafters=[DRAFTER_REMOTE]),
    "local": Speculation(drafters=list(_OWN.values())),
    **{name: Speculation(drafters=[number]) for name, number in _OWN.items()},
    "jacobi": Speculation(drafters=[DRAFTER_LOOKAHEAD], jacobi=True),
}
"""For each `SpeculationName`, the speculation of a request."""
