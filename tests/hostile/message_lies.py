"""Lies in a message: one field of a commit or of the response to `open` is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.v2 import model_pb2, verifier_pb2
from tests.hostile.lying_verifier import Commit, Lie, LyingSession

NOT_A_NUMBER = float("nan")
INFINITE = float("inf")
MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
NO_ENUM: Any = 99


def changing(kind: str, change: Callable[[Any, LyingSession], None]) -> Lie:
    """Return an honest session except that all messages of a kind are changed; commits only after some true ones."""

    async def lie(session: LyingSession) -> None:
        async for response in session.responses():
            lies = kind != "commit" or session.commits >= session.true_commits
            if lies and response.WhichOneof("message") == kind:
                change(getattr(response, kind), session)
            await session.say(response)

    return lie


def setting(**fields: Any) -> Callable[[Any, LyingSession], None]:
    """Return a change that sets fields."""

    def change(message: Any, session: LyingSession) -> None:
        for field, value in fields.items():
            setattr(message, field, value)

    return change


def _sources(sources: Callable[[int], list[Any]]) -> Callable[[Commit, LyingSession], None]:
    def change(commit: Commit, session: LyingSession) -> None:
        commit.sources[:] = sources(len(commit.committed.tokens))

    return change


def _tokens(tokens: Callable[[list[int]], list[int]]) -> Callable[[Commit, LyingSession], None]:
    """Return a change of the tokens and of all fields that go with them."""

    def change(commit: Commit, session: LyingSession) -> None:
        commit.committed.tokens[:] = tokens(list(commit.committed.tokens))
        count = len(commit.committed.tokens)
        commit.sources[:] = [model_pb2.TOKEN_SOURCE_PLAIN] * count
        if session.opening.HasField("top_logprobs"):
            del commit.logprobs[:]
            commit.logprobs.extend([verifier_pb2.TokenLogprobs(chosen=-1.0)] * count)

    return change


def _logprobs(make: Callable[[int], list[verifier_pb2.TokenLogprobs]]) -> Callable[[Commit, LyingSession], None]:
    def change(commit: Commit, session: LyingSession) -> None:
        count = len(commit.committed.tokens)
        del commit.logprobs[:]
        commit.logprobs.extend(make(count))

    return change


def _base(distance: int) -> Callable[[Commit, LyingSession], None]:
    def change(commit: Commit, session: LyingSession) -> None:
        commit.committed.base += distance

    return change


def logprob(chosen: float = -1.0, top: int = 0, first: int = 0, value: float = -1.0) -> verifier_pb2.TokenLogprobs:
    tops = range(first, first + top)
    return verifier_pb2.TokenLogprobs(chosen=chosen, top_tokens=tops, top_logprobs=[value] * top)


COMMITS: dict[str, Callable[[Any, LyingSession], None]] = {
    "made no step": setting(steps=0),
    "made the most steps there can be": setting(steps=MAX_UINT32),
    "made forty million steps": setting(steps=40_000_000),
    "accepted more than was offered": setting(offered=1, accepted=5),
    "was offered the most there can be": setting(offered=MAX_UINT32),
    "accepted the most there can be": setting(offered=MAX_UINT32, accepted=MAX_UINT32),
    "does not know its sources": _sources(lambda count: [model_pb2.TOKEN_SOURCE_UNSPECIFIED] * count),
    "names unknown sources": _sources(lambda count: [NO_ENUM] * count),
    "names too many sources": _sources(lambda count: [model_pb2.TOKEN_SOURCE_PLAIN] * (count + 1)),
    "names no sources": _sources(lambda count: []),
    "says that a draft made it all": _sources(lambda count: [model_pb2.TOKEN_SOURCE_REMOTE_DRAFT] * count),
    "says that its own draft made it all": _sources(lambda count: [model_pb2.TOKEN_SOURCE_LOCAL_MODEL] * count),
    "leaves a token out": _base(1),
    "goes back by a token": _base(-1),
    "is far ahead": _base(2**31),
    "commits nothing": _tokens(lambda tokens: []),
    "commits a token beyond the vocabulary": _tokens(lambda tokens: [*tokens[:-1], 320]),
    "commits the largest token": _tokens(lambda tokens: [MAX_UINT32]),
    "commits more than its steps can": _tokens(lambda tokens: tokens + [9] * 20),
    "commits more than the context": _tokens(lambda tokens: tokens + [9] * 100_000),
    "stops without an end token": setting(finish_reason=model_pb2.FINISH_REASON_STOP),
    "says too early that it is long enough": setting(finish_reason=model_pb2.FINISH_REASON_LENGTH),
    "says too early that the context is full": setting(finish_reason=model_pb2.FINISH_REASON_CONTEXT),
    "finishes for an unknown reason": setting(finish_reason=NO_ENUM),
    "finishes for a negative reason": setting(finish_reason=-1),
    "leaves log-probabilities out": _logprobs(lambda count: []),
    "tells too many log-probabilities": _logprobs(lambda count: [logprob()] * (count + 1)),
    "tells log-probabilities that are no numbers": _logprobs(lambda count: [logprob(NOT_A_NUMBER)] * count),
    "tells log-probabilities above zero": _logprobs(lambda count: [logprob(5.0, top=2, value=INFINITE)] * count),
    "tells log-probabilities of many tokens": _logprobs(lambda count: [logprob(top=10_000)] * count),
    "tells log-probabilities of unknown tokens": _logprobs(
        lambda count: [logprob(top=2, first=MAX_UINT32 - 2)] * count
    ),
    "explains what no draft learns from": lambda commit, _: commit.committed.overruled.extend(
        [model_pb2.TargetLogprobs(position=commit.committed.base, tokens=[9], logprobs=b"\0\0")]
    ),
    "wants a probability that is no number": setting(min_candidate_probability=NOT_A_NUMBER),
    "wants an infinite probability": setting(min_candidate_probability=INFINITE),
    "wants a negative probability": setting(min_candidate_probability=-INFINITE),
    "was preempted more than can be": setting(preemptions=MAX_UINT32),
    "found more than there was": setting(cached_tokens=MAX_UINT32),
    "has more sessions than can be": setting(drafted_sessions=MAX_UINT32),
    "is further away than can be": setting(round_trip_us=MAX_UINT32),
    "took longer than can be": setting(
        forward_us=MAX_UINT32, step_us=MAX_UINT32, waited_us=MAX_UINT32, queued_us=MAX_UINT64
    ),
}
"""Changes to a commit."""

OPENINGS: dict[str, Callable[[Any, LyingSession], None]] = {
    "takes no candidates": setting(max_nodes=0),
    "takes the most candidates there can be": setting(max_nodes=MAX_UINT32),
    "opens at a probability that is no number": setting(min_candidate_probability=NOT_A_NUMBER),
    "opens at a negative probability": setting(min_candidate_probability=-INFINITE),
    "has no context": lambda opened, _: setting(context_tokens=0, vocabulary_size=0)(opened.identity, _),
    "has the largest context": lambda opened, _: setting(context_tokens=MAX_UINT32, vocabulary_size=MAX_UINT32)(
        opened.identity, _
    ),
    "has no room for ever": lambda opened, _: setting(sessions=MAX_UINT32, room=0, wait_us=MAX_UINT64)(
        opened.capacity, _
    ),
    "has the most room there can be": lambda opened, _: setting(sessions=0, room=MAX_UINT32)(opened.capacity, _),
    "has a huge name": lambda opened, _: setting(
        model="m" * 1_000_000, numerics_fingerprint="\x00\n" * 100_000, numerics_mode=NO_ENUM
    )(opened.identity, _),
    "has a huge other tokenizer": lambda opened, _: setting(
        model="m" * 1_000_000, tokenizer_fingerprint="t" * 1_000_000
    )(opened.identity, _),
    "has another tokenizer": lambda opened, _: setting(tokenizer_fingerprint="0" * 64)(opened.identity, _),
    "speaks another protocol": lambda opened, _: setting(protocol_version=MAX_UINT32)(opened.identity, _),
    "has a huge fingerprint": lambda opened, _: setting(model_fingerprint="f" * 1_000_000)(opened.identity, _),
}
"""Changes to the response to `open`."""
