"""A lying verifier: a proxy before an honest one that alters its responses and signs them with a matching checksum.

A session's responses can be checked against its request. The choice of the next token cannot: a wrong token with a
right checksum is believed, and is not among these lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.serving import checksum
from specdec.serving.errors import InvalidRequestError, ModelFailureError, to_status
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc

Commit = verifier_pb2.Commit
Opened = verifier_pb2.VerifyOpened
Progress = model_pb2.Heartbeat

NOT_A_NUMBER = float("nan")
INFINITE = float("inf")
MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
NO_ENUM: Any = 99
STATUSES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


class LyingSession:
    """One session: its opening, the honest verifier's responses, and ways to send others."""

    def __init__(self, number: int, opening: verifier_pb2.VerifyOpen, context: Any, honest: Any) -> None:
        self.number = number  # index among the liar's sessions
        self.opening = opening
        self.base = len(opening.prompt_tokens) + len(opening.generated_tokens)
        self.commits = 0  # sent so far
        self.true_commits = int(opening.attempt <= 1)  # sent before it lies, so that there is a text to spoil
        self._checksum = checksum.of_opening(opening)
        self._context = context
        self._honest = honest

    async def responses(self) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        """Yield an honest verifier's responses."""
        async for response in self._honest:
            yield response

    async def say(self, response: verifier_pb2.VerifyResponse | bytes) -> None:
        """Send with a matching checksum."""
        if isinstance(response, verifier_pb2.VerifyResponse) and response.HasField("opened"):
            response.opened.checksum = checksum.of_opening(response.opened)
        if isinstance(response, verifier_pb2.VerifyResponse) and response.HasField("commit"):
            commit = response.commit
            self._checksum = checksum.extended(self._checksum, commit.committed.tokens, commit.finish_reason)
            commit.checksum = self._checksum
            self.base += len(commit.committed.tokens)
            self.commits += 1
        await self._context.write(response)

    async def say_damaged(self, response: verifier_pb2.VerifyResponse) -> None:
        """Send the honest response and checksum with one bit of the model's fingerprint flipped."""
        identity = response.opened.identity
        identity.model_fingerprint = chr(ord(identity.model_fingerprint[0]) ^ 1) + identity.model_fingerprint[1:]
        await self._context.write(response)

    async def commit(self, tokens: list[int], **fields: Any) -> None:
        """Send an invented commit, well-formed except for the fields."""
        news = model_pb2.Committed(base=self.base, tokens=tokens)
        said: dict[str, Any] = {"sources": [model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens), "steps": max(1, len(tokens))}
        said |= fields
        if self.opening.HasField("top_logprobs"):
            said.setdefault("logprobs", [verifier_pb2.TokenLogprobs(chosen=-1.0)] * len(tokens))
        await self.say(verifier_pb2.VerifyResponse(commit=Commit(committed=news, **said)))

    async def progress(self, **fields: Any) -> None:
        await self.say(verifier_pb2.VerifyResponse(heartbeat=Progress(**fields)))

    async def end(self, status: grpc.Status) -> None:
        await self._context.abort_with_status(status)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        await self._context.abort(code, details)


Lie = Callable[[LyingSession], Awaitable[None]]


class LyingVerifier:
    """A VerifierService that lies in one way about the responses of another."""

    name = "specdec.v2.VerifierService"

    def __init__(self, lie: Lie, honest: str) -> None:
        self._lie = lie
        self._channel = grpc.aio.insecure_channel(honest)
        self.sessions = 0  # count so far

    def register(self, server: Any) -> None:
        """Register with serializers that also take bytes, for undecodable messages."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._verify, verifier_pb2.VerifyRequest.FromString, _serialized
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, {"Verify": handler}),))
        server.add_registered_method_handlers(self.name, {"Verify": handler})

    async def close(self) -> None:
        await self._channel.close()

    async def _verify(self, requests: AsyncIterator[Any], context: Any) -> None:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        self.sessions += 1
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        honest = stub.Verify()
        await honest.write(first)
        forwarding = asyncio.create_task(_forward(requests, honest))
        try:
            await self._lie(LyingSession(self.sessions, first.open, context, honest))
        finally:
            forwarding.cancel()
            honest.cancel()


async def _forward(requests: AsyncIterator[Any], honest: Any) -> None:
    try:
        async for request in requests:
            await honest.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        pass  # it has sent its last message


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


# --- lies in a message ------------------------------------------------------------------------------


def changing(kind: str, change: Callable[[Any, LyingSession], None]) -> Lie:
    """Return an honest session except for all messages of a kind; if these are commits, after some true ones."""

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


# --- lies about the session -------------------------------------------------------------------------


async def begun(session: LyingSession, true_commits: int | None = None) -> None:
    """Relay the truth, up to and including this number of commits."""
    async for response in session.responses():
        await session.say(response)
        if session.commits >= (session.true_commits if true_commits is None else true_commits):
            return


async def for_ever(say: Callable[[], Awaitable[None]], pause: float = 0.0) -> None:
    while True:
        await say()
        await asyncio.sleep(pause)


async def says_nothing_after_its_last_word(session: LyingSession) -> None:
    """The text is over, and its last commit does not mark the end."""
    async for response in session.responses():
        if response.commit.finish_reason:
            response.commit.finish_reason = model_pb2.FINISH_REASON_UNSPECIFIED
        await session.say(response)
    await for_ever(session.progress, 0.1)


async def goes_on_past_the_end(session: LyingSession) -> None:
    """No end: past an end token, past the requested length, past the context."""
    async for response in session.responses():
        if response.commit.finish_reason:
            response.commit.finish_reason = model_pb2.FINISH_REASON_UNSPECIFIED
        await session.say(response)
    await for_ever(lambda: session.commit([9]))


async def never_commits(session: LyingSession) -> None:
    await begun(session, true_commits=0)
    await for_ever(session.progress, 0.1)


async def never_commits_again(session: LyingSession) -> None:
    await begun(session)
    await for_ever(session.progress, 0.1)


async def shows_life_without_end(session: LyingSession) -> None:
    await begun(session)
    await for_ever(session.progress)


async def commits_nothing_without_end(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.commit([]))


async def says_nothing_without_end(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.say(verifier_pb2.VerifyResponse()))


async def is_in_a_step_for_ever(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.progress(steps=MAX_UINT64, step_age_us=MAX_UINT64, step_expected_us=1), 0.1)


async def takes_every_step_to_be_long(session: LyingSession) -> None:
    """A step age that is suspicious only without an even larger expectation."""
    await begun(session)
    await for_ever(lambda: session.progress(step_age_us=MAX_UINT64 // 2, step_expected_us=MAX_UINT64), 0.1)


async def opens_twice(session: LyingSession) -> None:
    async for response in session.responses():
        await session.say(response)
        if response.HasField("opened"):
            await session.say(response)


async def commits_before_it_opens(session: LyingSession) -> None:
    await session.commit([9])
    async for response in session.responses():
        await session.say(response)


async def shows_life_and_never_opens(session: LyingSession) -> None:
    await for_ever(session.progress, 0.05)


async def never_opens(session: LyingSession) -> None:
    await asyncio.Event().wait()


async def falls_silent(session: LyingSession) -> None:
    await begun(session)
    await asyncio.Event().wait()


async def cannot_be_read(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.say(b"\x12\xff\xff\xff"), 0.05)


async def ends_as_if_all_were_well(session: LyingSession) -> None:
    await begun(session)


async def says_everything_twice(session: LyingSession) -> None:
    """Once there is a text to spoil."""
    async for response in session.responses():
        await session.say(response)
        if session.commits >= session.true_commits:
            await session.say(response)


async def is_preempted_more_each_time(session: LyingSession) -> None:
    """Reports the maximum count and breaks off; so does the next verifier."""
    async for response in session.responses():
        if response.HasField("commit"):
            response.commit.preemptions = MAX_UINT32
        await session.say(response)
        if session.opening.attempt <= 1 and session.commits:
            return


async def changes_its_model(session: LyingSession) -> None:
    """Each session reports another model, and breaks off."""
    async for response in session.responses():
        if response.HasField("opened"):
            response.opened.identity.model_fingerprint = f"{session.number:064}"
        await session.say(response)
        if session.commits >= session.true_commits:
            return


async def is_damaged_on_its_way(session: LyingSession) -> None:
    """Flips one bit of the response to each opening, then breaks off."""
    async for response in session.responses():
        if response.HasField("opened"):
            await session.say_damaged(response)
        else:
            await session.say(response)
        if session.commits >= session.true_commits:
            return


async def fails_inside(session: LyingSession) -> None:
    await begun(session)
    await session.end(to_status(ModelFailureError("the step failed: RuntimeError: " + "x" * 5000)))


async def fails_inside_before_it_opens(session: LyingSession) -> None:
    await session.end(to_status(ModelFailureError("the step failed: RuntimeError")))


async def finds_fault_too_late(session: LyingSession) -> None:
    await begun(session)
    violations = [(f"field[{number}]", "is not to the liar's taste") for number in range(100)]
    await session.end(to_status(InvalidRequestError(violations)))


async def finds_fault_with_everybody(session: LyingSession) -> None:
    await session.end(to_status(InvalidRequestError([("prompt_tokens", "y" * 5000)])))


def _full(seconds: int) -> grpc.Status:
    """Return a refusal with a retry delay."""
    retry = any_pb2.Any()
    retry.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds)))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message="full", details=[retry]))
    return status


async def is_full_for_ten_thousand_years(session: LyingSession) -> None:
    await session.end(_full(315_576_000_000))


async def was_full_in_the_past(session: LyingSession) -> None:
    await session.end(_full(-315_576_000_000))


async def is_full_beyond_all_numbers(session: LyingSession) -> None:
    await session.end(_full(2**62))


async def is_full_in_the_midst(session: LyingSession) -> None:
    await begun(session)
    await session.end(_full(2**40))


async def ends_with_every_status(session: LyingSession) -> None:
    """A different status per session; every second session ends before it has opened."""
    if session.number % 2:
        await begun(session)
    await session.abort(STATUSES[session.number // 2 % len(STATUSES)], "the liar says so")


async def ends_with_a_long_story(session: LyingSession) -> None:
    await begun(session)
    await session.abort(grpc.StatusCode.FAILED_PRECONDITION, "no " * 2000)


CONDUCTS: tuple[Lie, ...] = (
    says_nothing_after_its_last_word,
    goes_on_past_the_end,
    never_commits,
    never_commits_again,
    shows_life_without_end,
    commits_nothing_without_end,
    says_nothing_without_end,
    is_in_a_step_for_ever,
    takes_every_step_to_be_long,
    opens_twice,
    commits_before_it_opens,
    shows_life_and_never_opens,
    never_opens,
    falls_silent,
    cannot_be_read,
    ends_as_if_all_were_well,
    says_everything_twice,
    is_preempted_more_each_time,
    changes_its_model,
    is_damaged_on_its_way,
    fails_inside,
    fails_inside_before_it_opens,
    finds_fault_too_late,
    finds_fault_with_everybody,
    is_full_for_ten_thousand_years,
    was_full_in_the_past,
    is_full_beyond_all_numbers,
    is_full_in_the_midst,
    ends_with_every_status,
    ends_with_a_long_story,
)

LIES: dict[str, Lie] = (
    {name: changing("commit", change) for name, change in COMMITS.items()}
    | {name: changing("opened", change) for name, change in OPENINGS.items()}
    | {lie.__name__.replace("_", " "): lie for lie in CONDUCTS}
)
"""All lies, by description."""
