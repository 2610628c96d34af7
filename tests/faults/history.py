"""The pieces seen by clients, with times, and the checks of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from specdec.client import AsyncClient, Chunk, Finish, SpecdecError
from tests.faults.asks import Ask
from tests.margins import Oracle
from tests.models import END, tokenizer

LOGPROB_TOLERANCE = 1e-3
MAX_END_SECONDS = 15.0
"""Maximum seconds between a stream's last piece and its end, on a busy machine: with vLLM's engines on the same two
cores, three runs of hundreds of streams had 5.0 to 5.4."""

_TOKENIZER = tokenizer()


@dataclass
class Record:
    """One stream as its client saw it."""

    ask: Ask
    began: float = field(default_factory=time.monotonic)
    chunks: list[Chunk] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # arrival time of each chunk
    ended: float = 0.0
    error: SpecdecError | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finish(self) -> Finish | None:
        return self.chunks[-1].finish if self.chunks else None

    @property
    def wait(self) -> float:
        """Seconds until the first piece, or until the end."""
        return [*self.times, self.ended][0] - self.began

    @property
    def pause(self) -> tuple[float, float]:
        """(length, start) of the longest silence between two pieces."""
        return max(((b - a, a) for a, b in pairwise(self.times)), default=(0.0, self.began))

    @property
    def lingered(self) -> float:
        """Seconds from the last piece to the end of the call."""
        return self.ended - self.times[-1] if self.times and self.finish is not None else 0.0


async def record(client: AsyncClient, ask: Ask, seen: Callable[[Chunk], None] = lambda _: None) -> Record:
    """Run a request and record its stream; `seen` is called with each piece. An error ends the record and is part of
    it."""
    record = Record(ask)
    try:
        async with client.generate(tokens=ask.prompt, **ask.options) as stream:
            async for chunk in stream:
                record.times.append(time.monotonic())
                record.chunks.append(chunk)
                seen(chunk)
    except SpecdecError as error:
        record.error = error
    record.ended = time.monotonic()
    return record


async def undisturbed(client: AsyncClient, asks: list[Ask], at_once: int = 32) -> dict[int, Record]:
    """Return the reference of each request, by index: plain decoding without faults."""
    room = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Record:
        async with room:
            return await record(client, Ask(ask.prompt, ask.options | {"speculation": "off"}))

    records = await asyncio.gather(*map(one, asks))
    for found in records:
        assert not wrong_by_itself(found), wrong_by_itself(found)
    return dict(enumerate(records))


def wrong_by_itself(got: Record) -> str:
    """Return a fault that shows without a reference: an error at the end, gaps, repeats; empty if none."""
    if got.error is not None:
        return f"lost after {len(got.tokens)} tokens: {type(got.error).__name__} {got.error.reason}: {got.error}"
    if got.finish is None:
        return "no finish"
    if got.lingered > MAX_END_SECONDS:
        return f"the call went on for {got.lingered:.1f} s after its last piece"
    tokens = got.tokens
    if got.finish.completion_tokens != len(tokens):
        return f"{len(tokens)} tokens arrived, the server counts {got.finish.completion_tokens}"
    if got.finish.reason == "length" and len(tokens) != got.ask.options["max_tokens"]:
        return f"{len(tokens)} tokens, {got.ask.options['max_tokens']} were asked for"
    spelt = _TOKENIZER.decode([token for token in tokens if token != END])
    if not got.finish.stop and _readable(got.text) != _readable(spelt):
        return f"the text is {got.text!r}, its tokens say {spelt!r}"
    speculation = got.finish.speculation
    if sum(speculation.sources.values()) != len(tokens):
        return f"{len(tokens)} tokens arrived, by source {speculation.sources}"
    return ""


def wrong(got: Record, want: Record, oracle: Oracle) -> str:
    """Return a fault of the stream, or a difference from plain decoding; empty if none."""
    found = wrong_by_itself(got)
    if found or not got.ask.repeatable:
        return found
    try:
        oracle.same(list(got.ask.prompt), want.tokens, got.tokens, got.ask.sampler)
    except AssertionError as error:
        return f"spliced: {error}"
    if want.tokens != got.tokens:
        return ""  # a tie, counted by the oracle
    assert want.finish is not None
    assert got.finish is not None
    if (got.text, got.finish.reason, got.finish.stop) != (want.text, want.finish.reason, want.finish.stop):
        return f"text, reason or stop differ: {got.text!r} {got.finish}, not {want.text!r} {want.finish}"
    for a, b in zip(_logprobs(got), _logprobs(want), strict=True):
        if abs(a - b) > LOGPROB_TOLERANCE:
            return f"a log-probability of {a}, plain decoding has {b}"
    return ""


def _readable(text: str) -> str:
    """Drop replacement characters of incomplete bytes, since their number depends on the chunking."""
    return "".join(character for character in text if character.isascii())


def _logprobs(record: Record) -> list[float]:
    return [entry.chosen for chunk in record.chunks for entry in chunk.logprobs]
