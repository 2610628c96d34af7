"""Log-probabilities in the formats of chats and completions, per chunk or for a complete answer."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable

from specdec.client import Logprobs, Piece
from specdec.openai_api.json_text import Json, encoded, json_list, json_object

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks; vLLM uses the same value."""

UNTOLD = Piece("", b"")
"""Replaces the token text that an older orchestrator does not send."""


class TextOffset:
    """The character offset of the next token in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def before(self, piece: Piece) -> int:
        """Return a token's offset and advance past it."""
        begin = self._length
        self._length += len(self._decoder.decode(piece.bytes))
        return begin


def chat_logprobs(found: Iterable[Logprobs]) -> Json:
    """Return log-probabilities in the format of chats."""

    def one(piece: Piece, logprob: float) -> Json:
        return {"token": piece.text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(piece.bytes)}

    content = [
        {
            **one(entry.piece, entry.chosen),
            "top_logprobs": [one(entry.top_pieces.get(token, UNTOLD), logprob) for token, logprob in entry.top.items()],
        }
        for entry in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(found: Iterable[Logprobs], offset: TextOffset) -> Json:
    """Return log-probabilities in the format of completions."""
    told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in found:
        told["tokens"].append(entry.piece.text)
        told["token_logprobs"].append(max(entry.chosen, MIN_LOGPROB))
        top: dict[str, float] = {}
        for token, logprob in entry.top.items():  # best first: of tokens with equal text the best is kept
            top.setdefault(entry.top_pieces.get(token, UNTOLD).text, max(logprob, MIN_LOGPROB))
        told["top_logprobs"].append(top)
        told["text_offset"].append(offset.before(entry.piece))
    return told


class EncodedLogprobs:
    """One sample's log-probabilities, encoded as they arrive: encoding those of thousands of tokens takes seconds."""

    def __init__(self, tell: Callable[[Iterable[Logprobs]], Json]) -> None:
        """`tell` converts a chunk's log-probabilities to lists by field name."""
        self._tell = tell
        self._lists: defaultdict[str, list[str]] = defaultdict(list)
        self._others: Json = {}

    def add(self, found: Iterable[Logprobs]) -> None:
        """Add those of a chunk."""
        for name, value in self._tell(found).items():
            if isinstance(value, list):
                self._lists[name] += map(encoded, value)
            else:
                self._others[name] = value

    def whole(self) -> str:
        """Return all of them as JSON."""
        return json_object(self._others, {name: json_list(parts) for name, parts in self._lists.items()})
