"""The fuzzer: calls every port of a cluster in every wrong way, a given number of times, and counts the outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specdec.v2 import mux_pb2
from tests.hostile.access import Access
from tests.hostile.attacks import CARRY, Attack, attack
from tests.hostile.conduct import CONDUCTS, Talk
from tests.hostile.raw_bytes import send
from tests.hostile.tally import NAMES, Tally

AT_ONCE = 24
"""Attacks in flight. More would fill the KV memory of a small pod and leave no room for other callers."""

MAX_ATTACK_SECONDS = 20.0
"""Seconds after which an attack counts as stuck; none waits longer than its deadline."""

ANY = ""
"""Any kind of attack."""


class Fuzzer:
    """Attacks the addresses of each role, and counts in `tally`."""

    def __init__(self, addresses: Mapping[str, Sequence[str]], seed: int, access: Access) -> None:
        self.tally = Tally()
        self._access = access
        self.stuck: list[str] = []  # attacks that did not end
        self._addresses = addresses
        self._seed = seed
        self._numbers = itertools.count()

    async def run(self, messages: int) -> None:
        """Run until this number of messages was sent and every attack is over."""
        goal = self.tally.total + messages
        await self._run(lambda: self.tally.total < goal, ANY)

    async def run_only(self, kind: str, attacks: int) -> None:
        """Run until about `attacks` of a kind are over."""
        await self._run(lambda: self.tally.attacks[kind] < attacks, kind)

    async def _run(self, on: Callable[[], bool], kind: str) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._attack_on(on, kind))

    async def _attack_on(self, on: Callable[[], bool], kind: str) -> None:
        """Attack in a loop on its own connections while `on` returns True."""
        async with Connections(self._access) as connections:
            while on():
                found = attack(self._seed, next(self._numbers))
                if kind in (ANY, found.kind):
                    await self.make(found, connections)

    async def make(self, attack: Attack, connections: Connections) -> None:
        """Make an attack, and wait for its end."""
        self.tally.attacks[attack.kind] += 1
        self.tally.attacks[attack.manner] += bool(attack.manner)
        try:
            async with asyncio.timeout(MAX_ATTACK_SECONDS):
                await (self._call(attack, connections) if attack.path else self._send_noise(attack))
        except TimeoutError:
            self.stuck.append(str(attack))

    async def _send_noise(self, attack: Attack) -> None:
        address = attack.generator.choice(self._addresses[attack.role])
        tls = self._access.tls(attack.role, attack.generator)
        end = await send(address, attack.pieces(), attack.generator, lambda: self.tally.sent(attack.method), tls)
        self.tally.statuses[attack.method, end] += 1

    async def _call(self, attack: Attack, connections: Connections) -> None:
        generator, carries = attack.generator, attack.path == CARRY
        address = generator.choice(self._addresses[attack.role])
        channel = await connections.to(attack.role, address, generator)
        begin: Any = channel.stream_stream(attack.path)
        metadata = (*attack.metadata, *self._access.metadata(attack.role, generator))
        call = begin(timeout=attack.deadline, metadata=metadata, compression=attack.compression)

        def sent(message: bytes) -> None:
            self.tally.sent(attack.method)
            if carries:
                self.tally.frames += _frames_in(message)

        def heard(answer: bytes) -> None:
            if carries:
                self._hear_frames(answer, attack)

        await CONDUCTS[attack.manner].behave(Talk(call, attack.pieces(), generator, sent, heard))
        self.tally.ended(attack.method, (await call.code()).name, await call.details() or "", str(attack))

    def _hear_frames(self, answer: bytes, attack: Attack) -> None:
        """Count the statuses of multiplexed streams as well."""
        for frame in mux_pb2.ConnectResponse.FromString(answer).frames:
            if frame.HasField("end") and frame.stream:
                status = NAMES.get(frame.end.code, str(frame.end.code))
                self.tally.ended("Connect: a stream", status, frame.end.message, str(attack))


def _frames_in(message: bytes) -> int:
    """Return the number of decodable frames."""
    with contextlib.suppress(DecodeError):
        return len(mux_pb2.ConnectRequest.FromString(message).frames)
    return 0


class Connections:
    """Channels of one attacker, which share no connection with other attackers."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def to(self, role: str, address: str, generator: random.Random) -> grpc.aio.Channel:
        """Return the channel to an address; occasionally replace it."""
        if generator.random() < 0.02 and address in self._channels:
            await self._channels.pop(address).close()
        if address not in self._channels:
            self._channels[address] = self._access.channel(role, address, generator)
        return self._channels[address]
