"""Prompts in answers: their texts before completions (`echo`), and their log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import replace
from itertools import islice

from specdec.client import Chunk, Piece, PromptToken
from specdec.openai_api.json_text import Json, encoded, json_list
from specdec.openai_api.logprobs import MIN_LOGPROB, NO_PIECE, EncodedLogprobs, Offset, TextOffset, completion_logprobs


class EchoOffset:
    """The character offset of the next prompt token in the prompt's text. Tokens that are not in the text, such as BOS,
    do not advance it."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0  # in bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # in characters

    def before(self, piece: Piece) -> int:
        """Return a token's offset and advance past it."""
        begin, spelt = self._length, piece.bytes
        if not self._text.startswith(spelt, self._at):
            spelt = spelt.lstrip(b" ")  # some tokenizers put a space before the text
        if self._text.startswith(spelt, self._at):
            self._at += len(spelt)
            self._length += len(self._decoder.decode(spelt))
        return begin


class AnsweredPrompt:
    """One prompt in an answer. Its tokens are passed as they arrive, to `gather` or, in a stream, to `echo`."""

    def __init__(self, top: int | None = None, entries: int | None = None) -> None:
        """`top`: number of top log-probabilities per prompt token in the completions' field `logprobs`; None: the field
        does not cover the prompt. `entries`: the same for vLLM's field `prompt_logprobs`; None: no such field."""
        self.text = ""  # in front of completions
        self.logprobs = EncodedLogprobs(self._logprobs_of)
        self._offset: Offset = TextOffset()
        self._decoder: codecs.IncrementalDecoder | None = None  # for a text built from tokens
        self._top = top
        self._entries_top = entries
        self._entries: list[str] = []
        self._untold = False  # the text has not been streamed
        self.begun = False
        """True once `begin` was called."""

    def begin(self, text: bytes | None) -> None:
        """Set the text that precedes the prompt's completions; must be called before their first chunk. None: the text
        is built from the tokens."""
        self.begun = True
        if text is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        else:
            self.text, self._untold = text.decode(errors="replace"), True
            self._offset = EchoOffset(text)

    @property
    def fields(self) -> dict[str, str]:
        """The encoded field `prompt_logprobs`, if requested."""
        return {} if self._entries_top is None else {"prompt_logprobs": json_list(self._entries)}

    def gather(self, tokens: Sequence[PromptToken]) -> int:
        """Keep the next tokens' log-probabilities, and their text if it is built from them; return the number of
        characters."""
        spelled, before = len(self._spell(tokens)), len(self._entries)
        if self._entries_top is not None:
            self._entries += [encoded(_entry(token, self._entries_top)) for token in tokens]
        size = spelled + sum(map(len, self._entries[before:]))
        return size if self._top is None else size + self.logprobs.add(tokens)

    def echo(self, tokens: Sequence[PromptToken]) -> Json | None:
        """Return the fields of a stream piece for the next prompt tokens; None if there is nothing new. A text that
        was given is in the first piece."""
        scored, text = self._top is not None and tokens, self._spell(tokens)
        if self._untold:
            text, self._untold = self.text, False
        if not (text or scored):
            return None
        return {"text": text, "logprobs": self._logprobs_of(tokens) if scored else None, "finish_reason": None}

    def _spell(self, tokens: Sequence[PromptToken]) -> str:
        """Add the tokens to a text built from tokens; return the added text."""
        if self._decoder is None:
            return ""
        new = "".join(self._decoder.decode(token.piece.bytes) for token in tokens)
        self.text += new
        return new

    def _logprobs_of(self, tokens: Sequence[PromptToken]) -> Json:
        return completion_logprobs(tokens, self._offset, self._top)


def _entry(token: PromptToken, top: int) -> Json | None:
    """Return vLLM's entry for a token: by token id, its own log-probability and those of the most probable tokens."""
    found = token.logprobs
    if found is None:
        return None
    ranked = enumerate(islice(found.top.items(), top), 1)
    entry = {
        str(best): _entry_json(logprob, rank, found.top_pieces.get(best, NO_PIECE)) for rank, (best, logprob) in ranked
    }
    return {str(token.token): _entry_json(found.chosen, found.rank, token.piece)} | entry


def _entry_json(logprob: float, rank: int, piece: Piece) -> Json:
    return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank or None, "decoded_token": piece.text}


def _with_told_once(chunk: Chunk, first: Chunk) -> Chunk:
    """Return a chunk with the fields that a call sends only in its first chunk."""
    return replace(
        chunk,
        seed=first.seed,
        model_fingerprint=first.model_fingerprint,
        prompt_token_ids=first.prompt_token_ids,
    )


async def prompt_first(chunks: AsyncIterable[Chunk]) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of one prompt. The first sample carries the prompt; chunks of other samples are held back until
    the prompt is complete. The first chunk yielded also gets the fields that a call sends only once."""
    held: list[Chunk] | None = []
    begun = False
    async for chunk in chunks:
        if held is not None and chunk.index:
            held.append(chunk)
            continue
        yield chunk if begun or not held else _with_told_once(chunk, held[0])
        begun = True
        if held is not None and (chunk.tokens or chunk.finish):
            for other in held:
                yield other
            held = None
