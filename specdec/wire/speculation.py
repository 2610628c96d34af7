"""The names that clients and operators write for drafters, sets of drafters and scorers.

A new drafter in the contract needs its name in the two literals, words in `IN_WORDS`, and a `CandidateSource`
(`tests/wire/test_speculation.py`). CONTRIBUTING.md lists what else it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from specdec.v2.generation_pb2 import Speculation
from specdec.v2.model_pb2 import (
    DRAFT_SCORER_CALIBRATED,
    DRAFT_SCORER_PROBABILITY,
    DRAFTER_LOOKAHEAD,
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
    name.removeprefix("DRAFTER_").lower(): number for name, number in Drafter.items() if number
}

IN_WORDS: Mapping[DrafterName, str] = {
    "ngram": "n-gram lookup",
    "lookahead": "lookahead windows",
    "local_model": "the local draft",
    "heads": "heads",
}
"""The drafters inside the verifier by name, each in words for `--help`."""

OWN_NAMES = ", ".join(IN_WORDS)
OWN_IN_WORDS = " or ".join(", ".join(IN_WORDS.values()).rsplit(", ", 1))

SCORERS: Mapping[str, DraftScorer.ValueType] = {
    "calibrated": DRAFT_SCORER_CALIBRATED,
    "probability": DRAFT_SCORER_PROBABILITY,
}

SPECULATIONS: Mapping[str, Speculation] = {
    "auto": Speculation(),
    "off": Speculation(off=True),
    "always": Speculation(drafters=[DRAFTER_REMOTE], forced=True),
    "draft": Speculation(drafters=[DRAFTER_REMOTE]),
    "local": Speculation(drafters=[DRAFTERS[name] for name in IN_WORDS]),
    **{name: Speculation(drafters=[DRAFTERS[name]]) for name in IN_WORDS},
    "jacobi": Speculation(drafters=[DRAFTER_LOOKAHEAD], jacobi=True),
}
"""For each `SpeculationName`, the speculation of a request."""
