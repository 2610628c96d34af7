"""A channel to a servicer in the same process: its streams take as long as the network would, and are counted.

It looks like a `grpc.aio.Channel` to the generated stubs, and to the servicer like gRPC's context; both only as far
as the services use them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.serving.errors import STATUS, ServiceError

Behaviour = Callable[[AsyncIterator[Message], Any], Any]
"""A method of a servicer."""


@dataclass
class Traffic:
    """Traffic in one direction, over all streams of a channel."""

    messages: int = 0
    bytes: int = 0


class End:
    """The end of a stream, perhaps with an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Pipe:
    """One direction of a stream: messages come out in order, `delay` seconds after they went in."""

    def __init__(self, delay: float, traffic: Traffic) -> None:
        self._delay = delay
        self._traffic = traffic
        self._under_way: deque[Message | End] = deque()
        self._arrived: asyncio.Queue[Message | End] = asyncio.Queue()

    def send(self, message: Message) -> None:
        """Send a copy of the message as it is now, whatever its sender does with it afterwards."""
        wire = message.SerializeToString()
        self._traffic.messages += 1
        self._traffic.bytes += len(wire)
        self._dispatch(type(message).FromString(wire))

    def end(self, error: BaseException | None = None) -> None:
        self._dispatch(End(error))

    def cut(self, error: BaseException) -> None:
        """End this side at once."""
        self._arrived.put_nowait(End(error))

    async def receive(self) -> Message | End:
        return await self._arrived.get()

    def _dispatch(self, item: Message | End) -> None:
        # All take equally long, so timers come due in order; the queue keeps the order of simultaneous ones.
        self._under_way.append(item)
        asyncio.get_running_loop().call_later(self._delay, self._arrive)

    def _arrive(self) -> None:
        self._arrived.put_nowait(self._under_way.popleft())


class Call:
    """A running stream at its client's end; a task runs the servicer's method at the other."""

    def __init__(self, behaviour: Behaviour, channel: Channel) -> None:
        self._delay = channel.delay
        self._requests = Pipe(channel.delay, channel.there)
        self._responses = Pipe(channel.delay, channel.back)
        self._over = False
        self._serving = asyncio.create_task(self._serve(behaviour))

    async def write(self, message: Message) -> None:
        if self._over:
            raise asyncio.InvalidStateError("the stream is over")
        self._requests.send(message)

    async def read(self) -> Any:
        item = await self._responses.receive()
        if not isinstance(item, End):
            return item
        self._over = True
        if item.error is not None:
            raise item.error
        return grpc.aio.EOF

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            self._responses.cut(asyncio.CancelledError())
            asyncio.get_running_loop().call_later(self._delay, self._serving.cancel)

    async def _serve(self, behaviour: Behaviour) -> None:
        try:
            await behaviour(self._received(), Context(self._responses))
        except ServiceError as error:
            self._responses.end(_rpc_error(error))
        else:
            self._responses.end()

    async def _received(self) -> AsyncIterator[Message]:
        while not isinstance(item := await self._requests.receive(), End):
            yield item


@dataclass(frozen=True)
class Context:
    """The context that a servicer gets with its call."""

    responses: Pipe

    def time_remaining(self) -> None:
        """Return how long the call may take: as long as it likes."""

    async def write(self, message: Message) -> None:
        self.responses.send(message)


@dataclass
class Channel:
    """A channel to one servicer; `delay` is in seconds, one way."""

    servicer: object
    delay: float
    there: Traffic = field(default_factory=Traffic)
    back: Traffic = field(default_factory=Traffic)

    def stream_stream(self, path: str, *_: object, **__: object) -> Callable[..., Call]:
        behaviour: Behaviour = getattr(self.servicer, path.rpartition("/")[2])
        return lambda **_: Call(behaviour, self)

    def unary_unary(self, path: str, *_: object, **__: object) -> None:
        """Do nothing: stubs ask for all their methods when created, but unary ones are not called here."""


def _rpc_error(error: ServiceError) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(STATUS[type(error)], nothing, nothing, details=str(error))
