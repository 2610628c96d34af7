"""Requests to a verifier and a draft in a recording. Their times are ticks: turns of the step loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COUPLED, REJECTION, CONTRASTIVE = 1, 2, 3  # specdec.v2.AcceptanceRule
GREEDY: Mapping[str, Any] = {}
WARM: Mapping[str, Any] = {"temperature": 0.9, "seed": 5}
BIASED: Mapping[str, Any] = {"logit_bias": {3: 1.5}, "banned_tokens": [5], "repetition_penalty": 1.2}
PENALISED: Mapping[str, Any] = {
    "temperature": 1.0, "seed": 3, "top_k": 6, "top_p": 0.95, "repetition_penalty": 1.3,
    "frequency_penalty": 0.2, "presence_penalty": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One text. `policy` has fields of VerifyPolicy; `later` has further ones, by the tick at which they are sent."""

    arrives: int = 0
    prompt: int = 8  # tokens
    generated: int = 0  # tokens generated before the request
    same: int | None = None  # seed of its prompt, by default its own number; equal seeds share a prefix
    tokens: int = 32
    sampling: Mapping[str, Any] = field(default_factory=dict)
    rule: int = COUPLED
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of VerifyOpen
    policy: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None  # fields of DraftPolicy; None: no draft
    delay: int = 1  # ticks per message, one way
    resends: int | None = None  # when the draft is asked to resend its tree
    reads: int = 1  # interval of the client's reads, in ticks
    leaves: int | None = None  # when the client disconnects


@dataclass(frozen=True)
class Scenario:
    """Requests and their services. `base`, `row`: seconds for a pass of the target, and for each of its rows."""

    requests: tuple[Request, ...]
    blocks: int = 64
    base: float = 0.010
    row: float = 0.0002
    draft_base: float = 0.002
    draft_row: float = 0.0001
    threads: tuple[int, ...] = (1,)
    noise: float = 0.7  # error of a fake draft's logits
    local_draft: bool = False
    row_counts: tuple[int, ...] = ()  # row counts to which steps are padded
    max_unread_tokens: int = 256
    suffix_cache_tokens: int = 0
    ticks: int = 400


REMOTE, NGRAM, LOOKAHEAD, LOCAL_MODEL = 1, 2, 3, 4  # specdec.v2.Drafter
OWN = [NGRAM, LOOKAHEAD, LOCAL_MODEL]
DRAFTED: Mapping[str, Any] = {"draft": {"max_nodes": 24}, "policy": {"drafters": [REMOTE], "patience_us": 20_000}}
ALWAYS: Mapping[str, Any] = {
    "draft": {"max_nodes": 24},
    "policy": {"drafters": [REMOTE], "patience_us": 20_000, "forced": True},
}
GUESSED: Mapping[str, Any] = {"policy": {"drafters": OWN}}


def _window(window: int, ngram: int, guesses: int) -> Mapping[str, Any]:
    size = {"window": window, "ngram": ngram, "guesses": guesses}
    return {"policy": {"drafters": OWN, "lookahead": size}}


SCENARIOS: Mapping[str, Scenario] = {
    "drafted": Scenario(
        (
            Request(**DRAFTED),
            Request(prompt=30, sampling=WARM, options={"top_logprobs": 2}, **DRAFTED),
            Request(arrives=3, sampling=PENALISED, options={"min_tokens": 9, "end_tokens": [4]}, delay=2, **DRAFTED),
            Request(arrives=9, prompt=5, generated=7, sampling=WARM, resends=14, **DRAFTED),
            Request(arrives=9, tokens=20),
            Request(arrives=20, leaves=24, **DRAFTED),
        )
    ),
    "alone": Scenario((Request(tokens=60, sampling=WARM, delay=0, **DRAFTED),)),
    "padded": Scenario(
        tuple(
            Request(
                prompt=5 + 3 * i, tokens=24, sampling=WARM, policy={"drafters": [REMOTE, *OWN]}, draft=DRAFTED["draft"]
            )
            for i in range(3)
        ),
        row_counts=(8, 24, 64),
    ),
    "late drafts": Scenario(
        tuple(Request(tokens=40, sampling=WARM, delay=delay, **ALWAYS) for delay in (0, 2, 5)),
    ),
    "rejection": Scenario(
        (
            Request(sampling=WARM, rule=REJECTION, **ALWAYS),
            Request(sampling=PENALISED, rule=REJECTION, delay=0, options={"top_logprobs": 0}, **ALWAYS),
            Request(sampling=WARM, rule=REJECTION, **GUESSED),
            Request(sampling=WARM, rule=REJECTION, **_window(4, 3, 4)),
            Request(rule=REJECTION, **ALWAYS),
        )
    ),
    "contrastive": Scenario(
        (
            Request(rule=CONTRASTIVE, tokens=20, **ALWAYS),
            Request(rule=CONTRASTIVE, tokens=20, sampling=BIASED, delay=0, **ALWAYS),
            Request(rule=CONTRASTIVE, tokens=16, delay=3, options={"contrast": {"alpha": 0.3}}, **ALWAYS),
        )
    ),
    "lookups": Scenario(
        (
            Request(prompt=40, tokens=60, options={"tenant": "a"}, **GUESSED),
            Request(prompt=40, tokens=60, sampling=WARM, options={"tenant": "a"}, **GUESSED),
            Request(arrives=30, same=0, prompt=40, tokens=40, options={"tenant": "a"}, **GUESSED),
            Request(arrives=30, same=0, prompt=40, tokens=40, options={"tenant": "b"}, **GUESSED),
        ),
        suffix_cache_tokens=400,
    ),
    "windows": Scenario(
        (
            Request(tokens=40, **_window(5, 3, 4)),
            Request(tokens=40, sampling=WARM, **_window(4, 2, 1)),
            Request(tokens=40, sampling=PENALISED, **_window(3, 4, 2)),
            Request(tokens=40, **(dict(DRAFTED) | {"policy": {"drafters": [REMOTE, *OWN]}})),
        ),
        row=0.00001,
    ),
    "local draft": Scenario(
        tuple(
            Request(arrives=3 * i, prompt=10 + 20 * i, tokens=40, sampling=(GREEDY, WARM, PENALISED)[i % 3], **GUESSED)
            for i in range(5)
        ),
        local_draft=True,
    ),
    "preemption": Scenario(
        tuple(
            Request(arrives=i, prompt=60, tokens=100, sampling=WARM, reads=7, **(DRAFTED if i % 2 else GUESSED))
            for i in range(6)
        ),
        blocks=6,
        max_unread_tokens=24,
    ),
    "crowd": Scenario(
        tuple(
            Request(
                arrives=2 * (i // 3),
                prompt=(7, 120, 30)[i % 3],
                tokens=36,
                sampling=WARM if i % 2 else GREEDY,
                options={"coalesce_commits": i % 5 == 4},
                draft={"max_nodes": 16},
                policy={"drafters": [REMOTE, *(OWN if i % 4 else [])], "patience_us": 5_000},
            )
            for i in range(14)
        ),
        row=0.003,
        threads=(2, 1),
    ),
    "wrong drafts": Scenario(
        tuple(Request(arrives=i, prompt=5, tokens=80, sampling=WARM, delay=0, **DRAFTED) for i in range(5)),
        row=0.004,
        draft_base=0.02,
        noise=4.0,
        threads=(2, 1),
        ticks=600,
    ),
    "changes of mind": Scenario(
        (
            Request(tokens=60, later={12: {"drafters": []}, 30: {"drafters": [REMOTE, *OWN]}}, **ALWAYS),
            Request(tokens=60, sampling=WARM, later={15: {"drafters": []}, 25: {"drafters": OWN}}, **GUESSED),
            Request(tokens=60, sampling=WARM, later={20: {"max_candidates": 2}}, **DRAFTED),
        )
    ),
}
