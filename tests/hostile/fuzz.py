"""The fuzzer: calls every port of a cluster in every wrong way, as often as it is told.

An attack is a function of the seed and its number, and what it said can be looked at again; how attacks meet is a
matter of time. `python -m pytest -m verify tests/hostile/test_fuzz.py -s` prints what came of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from specdec.v1 import trunk_pb2
from tests.hostile.conduct import CONDUCTS, METADATA, Conduct, Talk
from tests.hostile.conversations import DRAFT, METHODS, VERIFY, draft, verify
from tests.hostile.distortion import DISTORTIONS
from tests.hostile.frames import MISUSES, misused
from tests.hostile.raw_bytes import NOISES, send
from tests.hostile.tally import NAMES, Tally

AT_ONCE = 24
"""Attacks under way. More would fill the key/value memory of a small pod, and then there is no room for anybody."""

LONGEST_ATTACK = 20.0
"""Seconds, after which an attack is taken for stuck; none waits for longer than its deadline."""

CARRY = "/specdec.v1.TrunkService/Carry"
CARRIED = {"verifier": (VERIFY, verify), "draft": (DRAFT, draft)}
"""The stream that the multiplexer of a role carries."""

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))

KINDS = {"call": 84, "frames": 10, "raw": 6}
"""How often each is chosen."""

Choice = TypeVar("Choice")


def weighted(choices: Iterable[tuple[Choice, int]], generator: random.Random) -> Choice:
    """One of them, as often as its weight says."""
    found = list(choices)
    chosen, _ = generator.choices(found, [weight for _, weight in found])[0]
    return chosen


class Fuzzer:
    """Attacks the addresses of each role, and keeps count in `tally`."""

    def __init__(self, addresses: Mapping[str, Sequence[str]], seed: int) -> None:
        self.tally = Tally()
        self.stuck: list[str] = []  # attacks that did not end
        self._addresses = addresses
        self._seed = seed
        self._numbers = itertools.count()

    async def run(self, messages: int) -> None:
        """Until so many were sent, and every attack is over."""
        goal = self.tally.total + messages
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._attack_on(goal))

    async def _attack_on(self, goal: int) -> None:
        """With connections of its own."""
        async with Connections() as connections:
            while self.tally.total < goal:
                await self.attack(next(self._numbers), connections)

    async def attack(self, number: int, connections: Connections) -> None:
        """The attack of this number."""
        generator = random.Random(f"{self._seed}:{number}")
        kind = weighted(KINDS.items(), generator)
        work = {"call": self._call, "frames": self._misuse_frames, "raw": self._send_noise}[kind]
        try:
            async with asyncio.timeout(LONGEST_ATTACK):
                await work(number, generator, connections)
        except TimeoutError:
            self.stuck.append(f"attack {number}, {kind}")

    # --- the kinds ----------------------------------------------------------------------------------

    async def _call(self, number: int, generator: random.Random, connections: Connections) -> None:
        """A conversation with a method, distorted."""
        method = weighted(((each, each.weight) for each in METHODS), generator)
        name, distort = weighted((((name, each), weight) for name, (each, weight) in DISTORTIONS.items()), generator)
        messages = distort(method.conversation(generator), generator)
        address = generator.choice(self._addresses[method.role])
        what = f"attack {number}, {method.role} {method.name}, {name}"
        await self._talk(address, method.path, method.name, messages, what, generator, connections)
        self.tally.attacks[name] += 1

    async def _misuse_frames(self, number: int, generator: random.Random, connections: Connections) -> None:
        """A stream of the multiplexer whose frames make no sense."""
        role = generator.choice(sorted(CARRIED))
        misuse = generator.choice(MISUSES)
        messages = misused(misuse, *CARRIED[role], generator)
        name = misuse.__name__.replace("_", " ")
        address = generator.choice(self._addresses[role])
        await self._talk(address, CARRY, "Carry", messages, f"attack {number}, {role} {name}", generator, connections)
        self.tally.attacks[f"frames: {name}"] += 1

    async def _send_noise(self, number: int, generator: random.Random, connections: Connections) -> None:
        """Bytes on a connection of their own."""
        address = generator.choice(self._addresses[generator.choice(sorted(self._addresses))])
        noise = generator.choice(NOISES)
        end = await send(address, noise(generator), generator, lambda: self.tally.sent("raw bytes"))
        self.tally.statuses["raw bytes", end] += 1
        self.tally.attacks[f"raw: {noise.__name__.replace('_', ' ')}"] += 1

    async def _talk(
        self,
        address: str,
        path: str,
        name: str,
        messages: Sequence[bytes],
        what: str,
        generator: random.Random,
        connections: Connections,
    ) -> None:
        """Say these messages in a call, and behave in some way."""
        manner = weighted(((each, CONDUCTS[each].weight) for each in CONDUCTS), generator)
        conduct: Conduct = CONDUCTS[manner]
        what = f"{what}, {manner}"
        channel = await connections.to(address, anew=generator.random() < 0.02)
        call: Any = channel.stream_stream(path)(
            timeout=generator.choice(conduct.deadlines),
            metadata=generator.choice(METADATA) if generator.random() < 0.1 else None,
        )

        def sent(message: bytes) -> None:
            self.tally.sent(name)
            if name == "Carry":
                self.tally.frames += _frames_in(message)

        def heard(answer: bytes) -> None:
            if name == "Carry":
                self._hear_frames(answer, what)

        await conduct.behave(Talk(call, messages, generator, sent, heard))
        self.tally.ended(name, (await call.code()).name, await call.details() or "", what)
        self.tally.attacks[manner] += 1

    def _hear_frames(self, answer: bytes, what: str) -> None:
        """Streams of the multiplexer have statuses too."""
        for frame in trunk_pb2.CarryResponse.FromString(answer).frames:
            if frame.HasField("end") and frame.stream:
                status = NAMES.get(frame.end.code, str(frame.end.code))
                self.tally.ended("Carry: a stream", status, frame.end.message, what)


def _frames_in(message: bytes) -> int:
    """As far as it can be read."""
    with contextlib.suppress(DecodeError):
        return len(trunk_pb2.CarryRequest.FromString(message).frames)
    return 0


class Connections:
    """Channels of one attacker, which share no connection with those of others."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def to(self, address: str, *, anew: bool) -> grpc.aio.Channel:
        """The one to an address; `anew` leaves that of before."""
        if anew and address in self._channels:
            await self._channels.pop(address).close()
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return self._channels[address]
