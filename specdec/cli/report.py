"""The report on a completion: the JSON object printed by `specdec generate --json`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from specdec.client import Chunk, Finish, Logprobs


class CompletionReport:
    """The report of one sample's completion: created with the request, filled chunk by chunk."""

    def __init__(self) -> None:
        self.request_id = ""  # in logs and traces
        self._start = time.monotonic()
        self._first: float | None = None
        self._seconds: float | None = None
        self.tokens: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[Logprobs] = []
        self.seed: int | None = None
        self._finish: Finish | None = None

    def add(self, chunk: Chunk) -> None:
        if self._first is None and chunk.tokens:
            self._first = self.seconds
        self.tokens += chunk.tokens
        self._text.append(chunk.text)
        self._reasoning.append(chunk.reasoning)
        self._logprobs += chunk.logprobs
        self.seed = chunk.seed if chunk.seed is not None else self.seed
        if chunk.finish:
            self._finish, self._seconds = chunk.finish, self.seconds

    @property
    def seconds(self) -> float:
        """Seconds since the request, until the finish."""
        return time.monotonic() - self._start if self._seconds is None else self._seconds

    @property
    def finish(self) -> Finish:
        assert self._finish is not None
        return self._finish

    def as_json(self) -> dict[str, Any]:
        finish, seconds = self.finish, self.seconds
        s = finish.speculation
        return {
            "tokens": self.tokens,
            "text": "".join(self._text),
            **({"reasoning": reasoning} if (reasoning := "".join(self._reasoning)) else {}),
            **({"logprobs": list(map(_logprobs_json, self._logprobs))} if self._logprobs else {}),
            "finish_reason": finish.reason,
            **({} if finish.schema_check is None else {"schema_check": asdict(finish.schema_check)}),
            **({"kept_for_learning": True} if finish.kept_for_learning else {}),
            "usage": {"prompt_tokens": finish.prompt_tokens, "completion_tokens": finish.completion_tokens},
            "seed": self.seed,
            "request_id": self.request_id,
            "speculation": {
                "steps": s.steps,
                "offered": s.offered,
                "accepted": s.accepted,
                "mean_tokens_per_step": s.mean_tokens_per_step,
                "sources": dict(s.sources),
                "undrafted_reason": s.undrafted_reason,
                "undrafted_tokens": s.undrafted_tokens,
                "decisions": asdict(s.decisions),
            },
            "seconds": seconds,
            "time_to_first_token": self._first or seconds,
        }


def _logprobs_json(found: Logprobs) -> dict[str, Any]:
    top = [
        {"token": token, "text": found.top_pieces[token].text if token in found.top_pieces else "", "logprob": logprob}
        for token, logprob in found.top.items()
    ]
    return {"text": found.piece.text, "logprob": found.chosen, "top": top}
