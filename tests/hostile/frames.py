"""Misuse of the multiplexer: batches of frames that no correct client sends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from specdec.serving.mux.stream import WINDOW
from specdec.v2.mux_pb2 import Begin, ConnectRequest, End, Frame
from tests.hostile.conversations import Conversation

MANY = 300

Misuse = Callable[[str, Sequence[bytes], random.Random], list[list[Frame]]]
"""Makes batches of frames from the name of a method and its messages."""


def _begin(stream: int, method: str, **fields: Any) -> Frame:
    return Frame(stream=stream, begin=Begin(method=method, **fields))


def _messages(stream: int, said: Sequence[bytes]) -> list[Frame]:
    return [Frame(stream=stream, message=message) for message in said]


def unknown_streams(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """Messages, reports and ends of streams that never began."""
    numbers = [generator.choice((0, 1, 2, 77, 2**32 - 1)) for _ in range(MANY)]
    events: tuple[dict[str, Any], ...] = ({"message": b"x"}, {"credit": 1}, {"end": End()})
    return [[Frame(stream=number, **generator.choice(events)) for number in numbers]]


def begun_twice(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[_begin(1, method), *_messages(1, said)], [_begin(1, method), *_messages(1, said)]]


def begun_again_after_its_end(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    once = [_begin(1, method), *_messages(1, said), Frame(stream=1, end=End())]
    return [once, once, once]


def begun_as_the_connection_itself(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[_begin(0, method), *_messages(0, said)], [Frame(stream=0, end=End())], [_begin(1, method)]]


def more_taken_than_sent(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[_begin(1, method), *_messages(1, said), Frame(stream=1, credit=generator.choice((10**6, 2**32 - 1)))]]


def nothing_taken(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[_begin(1, method), *_messages(1, said), *[Frame(stream=1, credit=0)] * MANY]]


def unknown_methods(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    names = ("", "/", method.lower(), f"{method}/", "/specdec.v2.MuxService/Connect", "\x00", "m" * 5000)
    return [[_begin(number, name) for number, name in enumerate(names, 1)]]


def huge_metadata(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """Includes a request id, which every log line would repeat."""
    metadata = {"x-request-id": "i" * 100_000} | {f"key-{number}": "v" * 1000 for number in range(100)}
    return [[_begin(1, method, metadata=metadata), *_messages(1, [b"\xff", *said])]]


def odd_metadata(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """Line breaks, control characters and keys that are illegal in gRPC."""
    metadata = {"x-request-id": 'a\n{"level": "error", "event": "forged"}\r\n\x1b[2J', "": "", "KEY with\x00": "\u202e"}
    return [[_begin(1, method, metadata=metadata), *_messages(1, [b"\xff", *said])]]


def never_opened(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """Streams that begin and then stay silent."""
    return [[_begin(number, method) for number in range(1, 1 + MANY // 10)]]


def left_at_once(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """Streams that end as soon as they have begun: a rapid reset."""
    return [[frame for n in range(1, 1 + MANY) for frame in (_begin(n, method), Frame(stream=n, end=End(code=n % 20)))]]


def without_event(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[_begin(1, method), *_messages(1, said[:1]), Frame(stream=1)], [Frame()] * MANY]


def empty_batches(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[], [], [_begin(1, method)], *[[]] * MANY]


def said_after_the_end(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    return [[_begin(1, method), Frame(stream=1, end=End(code=99)), *_messages(1, said), Frame(stream=1, end=End())]]


def beyond_the_window(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """More bytes than the window allows, without credit from the reader."""
    return [[_begin(1, method), *_messages(1, said)], *[_messages(1, [bytes(WINDOW // 3)])] * 8]


def beyond_the_window_unopened(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    """The same with many small messages, after a first one that opens a session."""
    return [[_begin(1, method), *_messages(1, [said[0], *[b""] * (WINDOW // 64)])]]


def odd_deadlines(method: str, said: Sequence[bytes], generator: random.Random) -> list[list[Frame]]:
    times = (0, 1, 1000, 2**63, 2**64 - 1)
    return [
        [frame for n, us in enumerate(times, 1) for frame in (_begin(n, method, timeout_us=us), *_messages(n, said))]
    ]


MISUSES: tuple[Misuse, ...] = (
    unknown_streams,
    begun_twice,
    begun_again_after_its_end,
    begun_as_the_connection_itself,
    more_taken_than_sent,
    nothing_taken,
    unknown_methods,
    huge_metadata,
    odd_metadata,
    never_opened,
    left_at_once,
    without_event,
    empty_batches,
    said_after_the_end,
    beyond_the_window,
    beyond_the_window_unopened,
    odd_deadlines,
)


def misused(misuse: Misuse, method: str, said: Conversation, generator: random.Random) -> list[bytes]:
    """Return the batches, serialized."""
    messages = [message.SerializeToString() for message in said(generator)]
    return [ConnectRequest(frames=frames).SerializeToString() for frames in misuse(method, messages, generator)]
