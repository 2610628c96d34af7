"""A lying draft: a table of lies, each a function of the session that it spoils.

Under COUPLED a draft decides no token, so no lie may change a text or delay it for long.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from specdec.v2 import draft_pb2, model_pb2

Extend = model_pb2.Extend

NOT_A_NUMBER = float("nan")
MAX_UINT32 = 2**32 - 1
CHAIN = (11, 12, 13, 14)

STATUSES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


class LyingSession:
    """One of the liar's sessions: its input, and ways to send anything."""

    def __init__(self, number: int, requests: AsyncIterator[Any], context: Any, identity: model_pb2.ModelIdentity):
        self.number = number  # index among the liar's sessions
        self.context = context
        self.identity = identity
        self.base = 0  # committed tokens according to its input
        self.requests = requests

    async def heard(self) -> AsyncIterator[None]:
        """Yield when the session begins, and for each commit."""
        async for request in self.requests:
            match request.WhichOneof("message"):
                case "open":
                    self.base = len(request.open.prompt_tokens) + len(request.open.generated_tokens)
                    yield
                case "committed":
                    self.base = request.committed.base + len(request.committed.tokens)
                    yield

    async def opened(self, **changes: Any) -> None:
        identity = model_pb2.ModelIdentity()
        identity.CopyFrom(self.identity)
        for field, value in changes.items():
            setattr(identity, field, value)
        await self.context.write(draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(identity=identity)))

    async def extend(self, extend: Extend) -> None:
        await self.context.write(draft_pb2.DraftResponse(extend=extend))

    async def progress(self, progress: model_pb2.Heartbeat) -> None:
        await self.context.write(draft_pb2.DraftResponse(heartbeat=progress))

    async def end(self, code: grpc.StatusCode, details: str) -> None:
        await self.context.abort(code, details)


Lie = Callable[[LyingSession], Awaitable[None]]


class LyingDraft:
    """A DraftService that lies in one way."""

    name = "specdec.v2.DraftService"

    def __init__(self, lie: Lie, identity: model_pb2.ModelIdentity) -> None:
        self._lie = lie
        self._identity = identity
        self.sessions = 0  # count so far

    def register(self, server: Any) -> None:
        """Register with serializers that also take bytes, for undecodable messages."""
        handler = grpc.stream_stream_rpc_method_handler(self._draft, draft_pb2.DraftRequest.FromString, _serialized)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, {"Draft": handler}),))
        server.add_registered_method_handlers(self.name, {"Draft": handler})

    async def close(self) -> None:
        """Do nothing: there is no state."""

    async def _draft(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.sessions += 1
        await self._lie(LyingSession(self.sessions, requests, context, self._identity))


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


# --- lies about candidates --------------------------------------------------------------------------


def chain(base: int, tokens: tuple[int, ...] = CHAIN, **changes: Any) -> Extend:
    """Return a chain of candidates, well-formed except for the changes."""
    fields = {"parents": range(len(tokens)), "logprob_bytes": bytes(len(tokens))} | changes
    return Extend(base=base, tokens=tokens, **fields)


def distribution(**changes: Any) -> model_pb2.DraftDistribution:
    fields: dict[str, Any] = {"parent": 0, "ids": [5, 9], "values": struct.pack("<2e", 1.0, 2.0)}
    return model_pb2.DraftDistribution(**fields | changes)


CANDIDATES: dict[str, Callable[[int], Extend]] = {
    "guesses at random": lambda base: chain(base, tuple(3 + (base * 7 + i) % 300 for i in range(20))),
    "names tokens beyond the vocabulary": lambda base: chain(base, (320, 321, 2**31, MAX_UINT32)),
    "is one token ahead": lambda base: chain(base + 1),
    "is far ahead": lambda base: chain(base + 100_000),
    "is behind": lambda base: chain(max(0, base - 3)),
    "starts from nothing": lambda base: chain(0),
    "starts from the largest number": lambda base: chain(MAX_UINT32),
    "has parents that do not precede": lambda base: chain(base, parents=(1, 2, 3, 4)),
    "has parents in a circle": lambda base: chain(base, parents=(2, 1, 4, 3)),
    "has parents that do not exist": lambda base: chain(base, parents=(0, 99, MAX_UINT32, 3)),
    "has too few parents": lambda base: chain(base, parents=(0,)),
    "has too many parents": lambda base: chain(base, parents=range(1000)),
    "has the lowest logprobs": lambda base: chain(base, logprob_bytes=b"\xff" * 4),
    "has logprobs at random": lambda base: chain(base, logprob_bytes=bytes(base * i % 256 for i in range(7, 11))),
    "has no logprobs": lambda base: chain(base, logprob_bytes=b""),
    "has too few logprobs": lambda base: chain(base, logprob_bytes=b"\x00"),
    "has too many logprobs": lambda base: chain(base, logprob_bytes=bytes(5000)),
    "offers thousands of nodes": lambda base: chain(base, tuple(3 + i % 300 for i in range(5000))),
    "offers as many nodes as it may": lambda base: chain(
        base, tuple(3 + i % 300 for i in range(1024)), parents=[0] * 1024
    ),
    "offers the deepest chain": lambda base: chain(base, tuple(3 + i % 300 for i in range(1024))),
    "offers one token many times": lambda base: chain(base, (9,) * 50, parents=[0] * 50),
    "offers nothing": lambda base: Extend(base=base),
    "offers nothing at no base": lambda base: Extend(),
    "sends distributions that nobody needs": lambda base: chain(
        base, distributions=[distribution(parent=i) for i in range(5)]
    ),
    "sends distributions that are cut": lambda base: chain(
        base, distributions=[distribution(values=b"\x00"), distribution(ids=[], values=b"\x01\x02\x03")]
    ),
    "sends distributions of no numbers": lambda base: chain(
        base, distributions=[distribution(values=struct.pack("<2e", NOT_A_NUMBER, -1.0))]
    ),
    "sends distributions out of order": lambda base: chain(
        base, distributions=[distribution(ids=[9, 5]), distribution(ids=[5, 5]), distribution(ids=[MAX_UINT32, 0])]
    ),
    "sends distributions of other nodes": lambda base: chain(
        base, distributions=[distribution(parent=77), distribution(parent=MAX_UINT32)]
    ),
    "sends distributions of a huge vocabulary": lambda base: chain(
        base, distributions=[distribution(ids=[], values=bytes(2 << 18))]
    ),
    "sends partial distributions of tokens beyond its vocabulary": lambda base: chain(
        base, distributions=[distribution(ids=[], id_gaps=[5, MAX_UINT32], vocabulary_size=320)]
    ),
    "sends partial distributions that are cut": lambda base: chain(
        base, distributions=[distribution(ids=[], id_gaps=[5, 4, 3], vocabulary_size=320)]
    ),
    "sends partial distributions of improbable size": lambda base: chain(
        base, distributions=[distribution(ids=[], id_gaps=[1] * 5000, vocabulary_size=MAX_UINT32, values=bytes(10_000))]
    ),
    "answers what nobody has asked": lambda base: chain(
        base, distributions=[distribution(ids=[], id_gaps=[5, 4], vocabulary_size=320, answer=True)]
    ),
    "has known everything for an hour": lambda base: chain(base, base_age_us=MAX_UINT32),
}
"""The candidates offered below each committed text, by lie."""


def offering(candidates: Callable[[int], Extend]) -> Lie:
    """Return a session that behaves correctly except for its candidates."""

    async def lie(session: LyingSession) -> None:
        begun = False
        async for _ in session.heard():
            if not begun:
                await session.opened()
                begun = True
            await session.extend(candidates(session.base))

    return lie


# --- lies about the session -------------------------------------------------------------------------


async def begun(session: LyingSession, **changes: Any) -> AsyncIterator[None]:
    """Open a session normally, except for changes to its identity; yield once it is open, and at each commit."""
    first = True
    async for _ in session.heard():
        if first:
            await session.opened(**changes)
            first = False
        yield


async def for_ever(say: Callable[[], Awaitable[None]]) -> None:
    """Repeat as fast as the connection accepts."""
    while True:
        await say()
        await asyncio.sleep(0)


async def talks_without_end(session: LyingSession) -> None:
    async for _ in begun(session):
        await for_ever(lambda: session.extend(chain(session.base)))


async def talks_nonsense_without_end(session: LyingSession) -> None:
    async for _ in begun(session):
        await for_ever(lambda: session.extend(chain(MAX_UINT32)))


async def talks_at_length_without_end(session: LyingSession) -> None:
    async for _ in begun(session):
        await for_ever(lambda: session.extend(chain(session.base, tuple(3 + i % 300 for i in range(1024)))))


async def shows_life_without_end(session: LyingSession) -> None:
    async for _ in begun(session):
        await for_ever(lambda: session.progress(model_pb2.Heartbeat(steps=1)))


async def says_nothing_without_end(session: LyingSession) -> None:
    async for _ in begun(session):
        await for_ever(lambda: session.context.write(draft_pb2.DraftResponse()))


async def never_opens(session: LyingSession) -> None:
    await asyncio.Event().wait()


async def shows_life_and_never_opens(session: LyingSession) -> None:
    while True:
        await session.progress(model_pb2.Heartbeat(steps=1))
        await asyncio.sleep(0.05)


async def opens_twice(session: LyingSession) -> None:
    async for _ in begun(session):
        await session.opened()
        await session.extend(chain(session.base))


async def guesses_before_it_opens(session: LyingSession) -> None:
    async for _ in session.heard():
        await session.extend(chain(session.base))
        await session.opened()


async def serves_another_tokenizer(session: LyingSession) -> None:
    async for _ in begun(session, tokenizer_fingerprint="0" * 64):
        await session.extend(chain(session.base))


async def speaks_another_protocol(session: LyingSession) -> None:
    async for _ in begun(session, protocol_version=MAX_UINT32):
        await session.extend(chain(session.base))


async def has_an_absurd_context(session: LyingSession) -> None:
    async for _ in begun(session, context_tokens=0, vocabulary_size=MAX_UINT32, numerics_mode=99):
        await session.extend(chain(session.base))


async def has_a_huge_name(session: LyingSession) -> None:
    async for _ in begun(session, model="m" * 1_000_000, numerics_fingerprint="\x00\n" * 100_000):
        await session.extend(chain(session.base))


async def has_a_huge_other_tokenizer(session: LyingSession) -> None:
    async for _ in begun(session, model="m" * 1_000_000, tokenizer_fingerprint="t" * 1_000_000):
        await session.extend(chain(session.base))


async def is_busier_than_can_be(session: LyingSession) -> None:
    load = model_pb2.PodCapacity(sessions=MAX_UINT32, room=MAX_UINT32, wait_us=2**64 - 1)
    async for _ in begun(session):
        await session.progress(model_pb2.Heartbeat(steps=2**64 - 1, capacity=load, step_age_us=2**64 - 1))
        await session.extend(chain(session.base))


async def ends_with_every_status(session: LyingSession) -> None:
    """A different status per session; every second session ends before it has opened."""
    if session.number % 2:
        async for _ in begun(session):
            break
    await session.end(STATUSES[session.number // 2 % len(STATUSES)], "the liar says so")


async def ends_at_once(session: LyingSession) -> None:
    """With status OK."""


async def ends_in_the_midst(session: LyingSession) -> None:
    commits = itertools.count()
    async for _ in begun(session):
        await session.extend(chain(session.base))
        if next(commits) == 3:
            return


async def ends_with_a_long_story(session: LyingSession) -> None:
    async for _ in begun(session):
        await session.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "full " * 1200)


async def falls_silent(session: LyingSession) -> None:
    async for _ in begun(session):
        await session.extend(chain(session.base))
        await asyncio.Event().wait()


async def breaks_off_in_a_message(session: LyingSession) -> None:
    async for _ in begun(session):
        whole = draft_pb2.DraftResponse(extend=chain(session.base)).SerializeToString()
        await session.context.write(whole[: len(whole) // 2])
        await asyncio.Event().wait()


async def guesses_for_other_texts(session: LyingSession) -> None:
    async for _ in begun(session):
        for distance in (-5, -1, 1, 2, 50):
            await session.extend(chain(max(0, session.base + distance)))


async def repeats_itself(session: LyingSession) -> None:
    first: Extend | None = None
    async for _ in begun(session):
        first = first or chain(session.base)
        await session.extend(first)


async def replays_all_it_said(session: LyingSession) -> None:
    said: list[Extend] = []
    async for _ in begun(session):
        said.append(chain(session.base))
        for extend in said:
            await session.extend(extend)


async def does_not_listen(session: LyingSession) -> None:
    """Opens, sends heartbeats, and never reads commits."""
    await session.opened()
    while True:
        await session.progress(model_pb2.Heartbeat(steps=1))
        await asyncio.sleep(0.05)


CONDUCTS: tuple[Lie, ...] = (
    talks_without_end,
    talks_nonsense_without_end,
    talks_at_length_without_end,
    shows_life_without_end,
    says_nothing_without_end,
    never_opens,
    shows_life_and_never_opens,
    opens_twice,
    guesses_before_it_opens,
    serves_another_tokenizer,
    speaks_another_protocol,
    has_an_absurd_context,
    has_a_huge_name,
    has_a_huge_other_tokenizer,
    is_busier_than_can_be,
    ends_with_every_status,
    ends_at_once,
    ends_in_the_midst,
    ends_with_a_long_story,
    falls_silent,
    breaks_off_in_a_message,
    guesses_for_other_texts,
    repeats_itself,
    replays_all_it_said,
    does_not_listen,
)

LIES: dict[str, Lie] = {name: offering(candidates) for name, candidates in CANDIDATES.items()} | {
    lie.__name__.replace("_", " "): lie for lie in CONDUCTS
}
"""All lies, by description."""
