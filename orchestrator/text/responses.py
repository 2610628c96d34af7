"""Joined responses: merges those of one sample that follow each other closely, or collects all for Complete."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

from specdec.serving.errors import InvalidRequestError
from specdec.serving.validation import MAX_ANSWER_BYTES
from specdec.v2 import generation_pb2

COALESCE_SECONDS = 0.02
"""Shortest interval in seconds between two messages of a sample. It must be shorter than the interval between two
commits of an undrafted text: otherwise each of these commits would be held for the next one."""

ADDED = ("text", "reasoning", "reasoning_tokens", "steps", "offered")
"""Fields of a response to be summed. Lists are joined; other fields, except `timings`, are the same in all responses or
set in one only."""

Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


async def coalesced(responses: Responses, seconds: float = COALESCE_SECONDS) -> Responses:
    """Yield the responses of one sample, coalesced. The first and the last are sent immediately; any other that arrives
    within `seconds` of the previous message is held, and sent with the next one or before an error. There is no timer:
    while a text stalls, a held response stays held.

    A drafted text is committed step by step, since its draft must receive every commit. Forwarding each commit to the
    client costs orchestrator and client half a millisecond, on cores that small models use too.
    """
    pending: generation_pb2.GenerateResponse | None = None
    sent_at = -seconds
    async with aclosing(responses):
        try:
            async for response in responses:
                pending = response if pending is None else _merge(pending, response)
                now = time.monotonic()
                if now - sent_at >= seconds or pending.HasField("finish"):
                    ready, pending, sent_at = pending, None, now
                    yield ready
        except Exception:
            if pending is not None:
                yield pending
            raise
    if pending is not None:
        yield pending


def _merge(
    first: generation_pb2.GenerateResponse, then: generation_pb2.GenerateResponse
) -> generation_pb2.GenerateResponse:
    """Merge two responses into one. Times are those of the later one, except that queueing times are summed."""
    sums = {name: getattr(first, name) + getattr(then, name) for name in ADDED}
    queued = first.timings.queued_us + then.timings.queued_us
    first.MergeFrom(then)
    for name, total in sums.items():
        setattr(first, name, total)
    first.timings.CopyFrom(then.timings)
    first.timings.queued_us = queued
    return first


class CompleteAnswer:
    """The answer to Complete, collected from the responses of all samples, without their `steps` and `offered`. Texts
    are joined once, at the end: appending to a message's string copies all of it."""

    def __init__(self, seed: int, samples: int) -> None:
        self._message = generation_pb2.CompleteResponse(seed=seed)
        for _ in range(samples):
            self._message.completions.add()
        self._reasoning: defaultdict[int, list[str]] = defaultdict(list)  # pieces, by sample
        self._text: defaultdict[int, list[str]] = defaultdict(list)
        self._size = 0  # bytes of all responses

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        """Add a response; InvalidRequestError if the answer becomes too long for one message."""
        self._size += response.ByteSize()
        if self._size > MAX_ANSWER_BYTES:
            limit = f"{MAX_ANSWER_BYTES >> 20} MiB, the limit of one message"
            field = "prompt_logprobs" if response.prompt else "max_tokens"
            raise InvalidRequestError([(field, f"the response is longer than {limit}: use Generate")])
        if response.HasField("resolved"):
            self._message.resolved.CopyFrom(response.resolved)
        self._message.prompt.extend(response.prompt)
        completion = self._message.completions[response.index]
        self._reasoning[response.index].append(response.reasoning)
        self._text[response.index].append(response.text)
        completion.reasoning_tokens += response.reasoning_tokens
        completion.tokens.extend(response.tokens)
        completion.sources.extend(response.sources)
        completion.logprobs.extend(response.logprobs)
        completion.rejected.extend(response.rejected)
        if response.HasField("finish"):
            completion.finish.CopyFrom(response.finish)

    def message(self) -> generation_pb2.CompleteResponse:
        """Return the answer; called after the last response."""
        for index, completion in enumerate(self._message.completions):
            completion.reasoning, completion.text = "".join(self._reasoning[index]), "".join(self._text[index])
        return self._message
