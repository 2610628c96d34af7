"""Log-probabilities in the formats of chats and completions, per chunk or for a complete answer."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from specdec.client import Chunk, Logprobs, Piece, PromptToken
from specdec.openai_api.json_text import Json, encoded, json_list, json_object

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks; vLLM uses the same value."""

NO_PIECE = Piece("", b"")
"""Placeholder for a token text that an older orchestrator does not send."""


class TextOffset:
    """The character offset of the next token in the text, which follows `prompt`."""

    def __init__(self, prompt: str = "") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = len(prompt)

    def before(self, piece: Piece) -> int:
        """Return a token's offset and advance past it."""
        begin = self._length
        self._length += len(self._decoder.decode(piece.bytes))
        return begin


def of_text(chunk: Chunk, *, with_end: bool) -> list[Logprobs]:
    """Return the log-probabilities of a chunk's tokens after the reasoning. `with_end`: include a token that ends the
    text and is not part of it."""
    found = chunk.logprobs[chunk.reasoning_tokens :]
    ended = chunk.finish is not None and chunk.finish.reason == "stop" and not chunk.finish.stop
    return found[:-1] if ended and not with_end else found


def chat_logprobs(found: Iterable[Logprobs]) -> Json:
    """Return log-probabilities in the format of chats."""

    def one(piece: Piece, logprob: float) -> Json:
        return {"token": piece.text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(piece.bytes)}

    content = [
        {
            **one(entry.piece, entry.chosen),
            "top_logprobs": [
                one(entry.top_pieces.get(token, NO_PIECE), logprob) for token, logprob in entry.top.items()
            ],
        }
        for entry in found
    ]
    return {"content": content, "refusal": None}


class Offset(Protocol):
    """Gives the position of each token in its text."""

    def before(self, piece: Piece) -> int:
        """Return the next token's offset in characters."""


def completion_logprobs(found: Iterable[Logprobs | PromptToken], offset: Offset, most: int | None = None) -> Json:
    """Return log-probabilities in the format of completions: of the chosen token, and of at most `most` top ones."""
    columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in found:
        columns["tokens"].append(entry.piece.text)
        columns["text_offset"].append(offset.before(entry.piece))
        logprobs = entry.logprobs if isinstance(entry, PromptToken) else entry
        if logprobs is None:
            columns["token_logprobs"].append(None)
            columns["top_logprobs"].append(None)
            continue
        columns["token_logprobs"].append(max(logprobs.chosen, MIN_LOGPROB))
        top: dict[str, float] = {}
        for token, logprob in islice(logprobs.top.items(), most):  # best first, so of equal texts the best is kept
            top.setdefault(logprobs.top_pieces.get(token, NO_PIECE).text, max(logprob, MIN_LOGPROB))
        top.setdefault(entry.piece.text, columns["token_logprobs"][-1])
        columns["top_logprobs"].append(top)
    return columns


Entry = TypeVar("Entry")


class EncodedLogprobs(Generic[Entry]):
    """Log-probabilities encoded as they arrive: for thousands of tokens, encoding all at the end takes seconds."""

    def __init__(self, tell: Callable[[Sequence[Entry]], Json]) -> None:
        """`tell` converts a chunk's log-probabilities to lists by field name."""
        self._tell = tell
        self._lists: defaultdict[str, list[str]] = defaultdict(list)
        self._others: Json = {}

    def add(self, found: Sequence[Entry]) -> int:
        """Add a chunk's log-probabilities; return their number of characters."""
        size = 0
        for name, value in self._tell(found).items():
            if isinstance(value, list):
                parts = list(map(encoded, value))
                self._lists[name] += parts
                size += sum(map(len, parts))
            else:
                self._others[name] = value
        return size

    def whole(self, before: EncodedLogprobs[Any] | None = None) -> str:
        """Return all log-probabilities as JSON, after those in `before`."""
        earlier = {} if before is None else before._lists
        lists = {name: json_list([*earlier.get(name, ()), *parts]) for name, parts in self._lists.items()}
        return json_object(self._others, lists)
