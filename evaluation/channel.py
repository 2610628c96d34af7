"""A channel to a servicer in the same process: it delays messages as the network would, and counts them.

It stands in for `grpc.aio.Channel` in the generated stubs, and for gRPC's context in the servicer, as far as the
services use them.
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
class MessageCounters:
    """Traffic in one direction, over all streams of a channel."""

    messages: int = 0
    bytes: int = 0


class End:
    """The end of a stream, perhaps with an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Pipe:
    """One direction of a stream: delivers messages in order, `delay` seconds after they were sent."""

    def __init__(self, delay: float, traffic: MessageCounters) -> None:
        self._delay = delay
        self._traffic = traffic
        self._under_way: deque[Message | End] = deque()
        self._arrived: asyncio.Queue[Message | End] = asyncio.Queue()

    def send(self, message: Message) -> None:
        """Send a copy of the message: the sender may change or reuse its own."""
        wire = message.SerializeToString()
        self._traffic.messages += 1
        self._traffic.bytes += len(wire)
        self._dispatch(type(message).FromString(wire))

    def end(self, error: BaseException | None = None) -> None:
        self._dispatch(End(error))

    def cut(self, error: BaseException) -> None:
        """End the receiving side immediately, without the delay."""
        self._arrived.put_nowait(End(error))

    async def receive(self) -> Message | End:
        return await self._arrived.get()

    def _dispatch(self, item: Message | End) -> None:
        # The delay is constant, so timers fire in order; the queue keeps the order of simultaneous ones.
        self._under_way.append(item)
        asyncio.get_running_loop().call_later(self._delay, self._arrive)

    def _arrive(self) -> None:
        self._arrived.put_nowait(self._under_way.popleft())


class InProcessCall:
    """The client's end of a running stream; a task runs the servicer's method at the other end."""

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
    """The context of a call, for the servicer."""

    responses: Pipe

    def time_remaining(self) -> None:
        """Return the time left for the call: None, since it has no deadline."""

    async def write(self, message: Message) -> None:
        self.responses.send(message)


@dataclass
class Channel:
    """A channel to one servicer; `delay` is in seconds, one way."""

    servicer: object
    delay: float
    there: MessageCounters = field(default_factory=MessageCounters)
    back: MessageCounters = field(default_factory=MessageCounters)

    def stream_stream(self, path: str, *_: object, **__: object) -> Callable[..., InProcessCall]:
        behaviour: Behaviour = getattr(self.servicer, path.rpartition("/")[2])
        return lambda **_: InProcessCall(behaviour, self)

    def unary_unary(self, path: str, *_: object, **__: object) -> None:
        """Do nothing: stubs look up all their methods when created, but unary ones are not called here."""


def _rpc_error(error: ServiceError) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(STATUS[type(error)], nothing, nothing, details=str(error))
