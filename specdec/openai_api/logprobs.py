"""Log-probabilities as chats and as completions have them: of a chunk, or of a whole answer, chunk by chunk."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable

from specdec.client import Logprobs, Piece
from specdec.openai_api.json_text import Json, encoded, json_list, json_object

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM's is the same."""

UNTOLD = Piece("", b"")
"""Stands for what an older orchestrator does not tell of a token."""


class TextOffset:
    """The place in the text at which the next token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def before(self, piece: Piece) -> int:
        """Return where a token begins, and go on behind it."""
        begin = self._length
        self._length += len(self._decoder.decode(piece.bytes))
        return begin


def chat_logprobs(found: Iterable[Logprobs]) -> Json:
    """Return log-probabilities as chats have them."""

    def one(piece: Piece, logprob: float) -> Json:
        return {"token": piece.text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(piece.bytes)}

    content = [
        {
            **one(each.piece, each.chosen),
            "top_logprobs": [one(each.top_pieces.get(token, UNTOLD), logprob) for token, logprob in each.top.items()],
        }
        for each in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(found: Iterable[Logprobs], offset: TextOffset) -> Json:
    """Return log-probabilities as completions have them."""
    told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in found:
        told["tokens"].append(each.piece.text)
        told["token_logprobs"].append(max(each.chosen, LEAST_LOGPROB))
        top: dict[str, float] = {}
        for token, logprob in each.top.items():  # best first: of tokens that read alike it stands
            top.setdefault(each.top_pieces.get(token, UNTOLD).text, max(logprob, LEAST_LOGPROB))
        told["top_logprobs"].append(top)
        told["text_offset"].append(offset.before(each.piece))
    return told


class EncodedLogprobs:
    """Log-probabilities of one sample, encoded as they come: of thousands of tokens that takes seconds."""

    def __init__(self, tell: Callable[[Iterable[Logprobs]], Json]) -> None:
        """`tell` returns those of a chunk, in lists by name."""
        self._tell = tell
        self._lists: defaultdict[str, list[str]] = defaultdict(list)
        self._others: Json = {}

    def add(self, found: Iterable[Logprobs]) -> None:
        """Enter those of a chunk."""
        for name, value in self._tell(found).items():
            if isinstance(value, list):
                self._lists[name] += map(encoded, value)
            else:
                self._others[name] = value

    def whole(self) -> str:
        """Return all of them in JSON."""
        return json_object(self._others, {name: json_list(parts) for name, parts in self._lists.items()})
