"""The delay proxy: it delays by the set time, and is transparent otherwise."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from testing.delay_process import DelayProcess
from testing.delay_proxy import RESET, DelayProxy
from tests.stack import until

DELAY = 0.03
PATIENCE = 10.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo everything, then close."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer once everything has been read, which requires half-closed connections."""
    heard = await reader.read()
    writer.write(heard[::-1])
    writer.close()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(1)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


@asynccontextmanager
async def server(serve: object) -> AsyncIterator[str]:
    """Yield the address of a server in this loop."""
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)  # type: ignore[arg-type]
    try:
        yield "127.0.0.1:{1}".format(*listening.sockets[0].getsockname())
    finally:
        listening.close()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_round_trip_takes_twice_the_delay() -> None:
    async with server(echo) as address, DelayProxy(DELAY) as proxy:
        reader, writer = await connect(await proxy.to(address))
        for delay in (DELAY, 0.0, DELAY / 2):  # adjustable at run time
            proxy.delay = delay
            start = time.monotonic()
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            assert time.monotonic() - start >= 2 * delay
        writer.close()
        await until(lambda: proxy.connections == 0)


async def test_it_is_a_longer_cable_not_a_thinner_one() -> None:
    """The proxy adds latency without reducing throughput: a hundred messages take as long as one."""
    count = 100
    async with server(echo) as address, DelayProxy(DELAY) as proxy:
        reader, writer = await connect(await proxy.to(address))
        start = time.monotonic()
        for number in range(count):
            writer.write(bytes([number]))
            await asyncio.sleep(0)  # a separate write
        assert await reader.readexactly(count) == bytes(range(count))
        assert 2 * DELAY <= time.monotonic() - start < count * DELAY
        writer.close()


async def test_bytes_arrive_as_they_were_sent() -> None:
    data = random.Random(1).randbytes(8 << 20)  # more than buffers hold
    async with server(echo) as address, DelayProxy(DELAY) as proxy:
        reader, writer = await connect(await proxy.to(address))

        async def send() -> None:
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        _, heard = await asyncio.gather(send(), reader.read())
        assert heard == data
        writer.close()
        await until(lambda: proxy.connections == 0)


async def test_one_direction_may_end_before_the_other() -> None:
    async with server(answer_at_the_end) as address, DelayProxy(DELAY) as proxy:
        reader, writer = await connect(await proxy.to(address))
        writer.write(b"abc")
        writer.write_eof()
        assert await reader.read() == b"cba"
        writer.close()
        await until(lambda: proxy.connections == 0)


async def test_many_connections_do_not_mix() -> None:
    async with server(echo) as address, DelayProxy(DELAY) as proxy:
        place = await proxy.to(address)

        async def one(number: int) -> None:
            data = random.Random(number).randbytes(20_000)
            reader, writer = await connect(place)
            for start in range(0, len(data), 1000):
                writer.write(data[start : start + 1000])
                await writer.drain()
            assert await reader.readexactly(len(data)) == data
            writer.close()

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*map(one, range(100)))
        await until(lambda: proxy.connections == 0)


async def test_a_broken_connection_is_broken_at_the_other_end() -> None:
    async with server(hang_up) as address, DelayProxy(DELAY) as proxy:
        reader, writer = await connect(await proxy.to(address))
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        await until(lambda: proxy.connections == 0)


async def test_a_server_that_is_not_there() -> None:
    async with server(echo) as address:
        pass
    async with DelayProxy(DELAY) as proxy:
        reader, writer = await connect(await proxy.to(address))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        await until(lambda: proxy.connections == 0)


async def test_leaving_breaks_what_is_open() -> None:
    async with server(echo) as address:
        async with DelayProxy(DELAY) as proxy:
            reader, writer = await connect(await proxy.to(address))
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        assert proxy.connections == 0


async def test_a_stall_delivers_nothing_and_loses_nothing() -> None:
    async with server(echo) as address, DelayProxy() as proxy:
        reader, writer = await connect(await proxy.to(address))
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.stall()
        writer.write(b"b")
        await until(lambda: bool(proxy.waiting))
        writer.write(b"c")
        other, late = await connect(await proxy.to(address))  # new connections succeed, but stall too
        late.write(b"d")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 2 * DELAY)
        proxy.resume()
        assert await reader.readexactly(2) == b"bc"
        assert await other.readexactly(1) == b"d"
        for end in (writer, late):
            end.close()
        await until(lambda: proxy.connections == 0)


async def test_a_peer_that_left_in_a_stall_is_missed_after_it() -> None:
    async with server(echo) as address, DelayProxy() as proxy:
        reader, writer = await connect(await proxy.to(address))
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.stall()
        writer.close()
        await until(lambda: bool(proxy.waiting))
        proxy.resume()
        await until(lambda: proxy.connections == 0)


async def test_a_reset_breaks_what_is_open_and_nothing_else() -> None:
    async with server(echo) as address, DelayProxy() as proxy:
        place = await proxy.to(address)
        for _ in range(2):
            reader, writer = await connect(place)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            await until(lambda: proxy.connections == 0)


async def test_as_a_process() -> None:
    with DelayProcess.start() as proxy:
        async with server(echo) as address:
            reader, writer = await connect(await asyncio.to_thread(proxy.to, address))
            for delay in (0.0, DELAY):
                await asyncio.to_thread(proxy.delay, delay)
                start = time.monotonic()
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                assert time.monotonic() - start >= 2 * delay
            writer.close()
