"""Answers in OpenAI's shape: of a chat, and of completions; whole, and in pieces.

What OpenAI has no field for stands in the field `specdec` of the answer (how the request was understood) and of each
choice (what speculation did).
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.client import Chunk, Completion, Finish, Logprobs, Piece, Resolved

Json = dict[str, Any]

REASONS = {"stop": "stop", "length": "length", "context": "length"}
"""Reasons to finish to OpenAI's names for them; the context is a length too."""


@dataclass(frozen=True)
class Frame:
    """What all pieces of an answer have in common."""

    chat: bool
    id: str
    created: int  # seconds since 1970
    model: str

    def whole(self, choices: Sequence[Json], finishes: Sequence[Finish], own: Json, usage: Json) -> Json:
        """Return a whole answer."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": fingerprint(finishes),
            "specdec": own,
        }

    def piece(self, choices: Sequence[Json], **others: Any) -> Json:
        """Return an event of a stream."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **others,
        }


def choice_of(completion: Completion, index: int, *, chat: bool, logprobs: bool) -> Json:
    """Return a whole sample."""
    told = None
    if logprobs:
        told = chat_logprobs(completion.logprobs) if chat else Offsets().logprobs(completion.logprobs)
    said = {"message": {"role": "assistant", "content": completion.text}} if chat else {"text": completion.text}
    return {"index": index, **said, "logprobs": told, **_end(completion.finish)}


class ChoiceStream:
    """The pieces of one sample, in order."""

    def __init__(self, index: int, *, chat: bool, logprobs: bool) -> None:
        self._index = index
        self._chat = chat
        self._logprobs = logprobs
        self._offsets = Offsets()

    def opening(self) -> Json:
        """Return what a chat's sample begins with: who speaks."""
        return {
            "index": self._index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def piece(self, chunk: Chunk) -> Json:
        told = None
        if self._logprobs and chunk.logprobs:
            told = chat_logprobs(chunk.logprobs) if self._chat else self._offsets.logprobs(chunk.logprobs)
        said: Json = {"text": chunk.text}
        if self._chat:
            said = {"delta": {"content": chunk.text} if chunk.text or chunk.finish is None else {}}
        end = {"finish_reason": None} if chunk.finish is None else _end(chunk.finish)
        return {"index": self._index, **said, "logprobs": told, **end}


def usage_of(finishes: Sequence[Finish], prompts: int) -> Json:
    """Return the token counts of `prompts` prompts with as many samples each, in order. A prompt counts once, however
    many samples it has."""
    firsts = finishes[:: len(finishes) // prompts]
    prompt, completion = (
        sum(each.prompt_tokens for each in firsts),
        sum(each.completion_tokens for each in finishes),
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in firsts)},
    }


def resolved_of(seed: int | None, resolved: Resolved | None) -> Json:
    """Return how the request was understood, where it left something open."""
    if resolved is None:
        return {"seed": seed}
    told = asdict(resolved)
    told["time"] = None if resolved.time is None else resolved.time.isoformat()
    return {"seed": seed, "resolved": told}


def fingerprint(finishes: Iterable[Finish]) -> str:
    """Return a name for what the tokens were computed with: equal ones, and the same seed, mean equal tokens."""
    numerics = sorted({each.numerics for each in finishes})
    return f"fp_{hashlib.sha256(' '.join(numerics).encode()).hexdigest()[:16]}"


def chat_logprobs(found: Iterable[Logprobs]) -> Json:
    """Return log-probabilities as chats have them."""

    def one(piece: Piece, logprob: float) -> Json:
        return {"token": piece.text, "logprob": logprob, "bytes": list(piece.bytes)}

    return {
        "content": [
            {
                **one(each.piece, each.chosen),
                "top_logprobs": [one(each.top_pieces[token], logprob) for token, logprob in each.top.items()],
            }
            for each in found
        ],
        "refusal": None,
    }


class Offsets:
    """Log-probabilities as completions have them, with the place in the text at which each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def logprobs(self, found: Iterable[Logprobs]) -> Json:
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in found:
            told["tokens"].append(each.piece.text)
            told["token_logprobs"].append(each.chosen)
            top: dict[str, float] = {}
            for token, logprob in each.top.items():  # best first: of tokens that read alike it stands
                top.setdefault(each.top_pieces[token].text, logprob)
            told["top_logprobs"].append(top)
            told["text_offset"].append(self._length)
            self._length += len(self._decoder.decode(each.piece.bytes))
        return told


def _end(finish: Finish) -> Json:
    """Return how a sample ended, as OpenAI and, in `specdec`, as only this project tells it."""
    return {
        "finish_reason": REASONS.get(finish.reason, "stop"),
        "stop_reason": finish.stop or None,  # as vLLM names it
        "specdec": {
            **asdict(finish.speculation),
            "mean_tokens_per_step": finish.speculation.mean_tokens_per_step,
            "numerics": finish.numerics,
            "exact": finish.exact,
            "reproducible": finish.reproducible,
            "preemptions": finish.preemptions,
        },
    }
