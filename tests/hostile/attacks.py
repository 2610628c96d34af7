"""The sequence of attacks: a function of seed and number, so that each can be reproduced."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc

from tests.hostile.conduct import CONDUCTS, METADATA, Metadata
from tests.hostile.conversations import DRAFT, ENCRYPTED_ROLES, METHODS, VERIFY, draft, verify
from tests.hostile.distortion import DISTORTIONS
from tests.hostile.frames import MISUSES, misused
from tests.hostile.raw_bytes import HTTP_NOISES, NOISES

CARRY = "/specdec.v2.MuxService/Connect"
CARRIED = {"verifier": (VERIFY, verify), "draft": (DRAFT, draft)}
"""The stream carried by the multiplexer of a role."""

ROLES = (*ENCRYPTED_ROLES, "health", "metrics")

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Attack:
    """An attack and its target. `pieces` makes the messages of a call, or bytes for a connection if `path` is empty."""

    number: int
    kind: str
    role: str
    generator: random.Random
    pieces: Callable[[], list[bytes]]
    path: str = ""
    manner: str = ""
    deadline: float = 0.0
    metadata: Metadata = ()
    compression: grpc.Compression = grpc.Compression.NoCompression

    @property
    def method(self) -> str:
        """The key under which it is counted."""
        return (self.path.rpartition("/")[2] or "(none)") if self.path else "raw bytes"

    def __str__(self) -> str:
        return f"attack {self.number}: {self.kind}, {self.role} {self.method}, {self.manner}"


def attack(seed: int, number: int) -> Attack:
    generator = random.Random(f"{seed}:{number}")
    make = weighted(((_call, 84), (_misuse_of_frames, 10), (_noise, 6)), generator)
    return make(number, generator)


def kinds() -> list[str]:
    return [
        *DISTORTIONS,
        *(f"frames: {_words(misuse)}" for misuse in MISUSES),
        *(f"raw: {_words(noise)}" for noise in dict.fromkeys((*NOISES, *HTTP_NOISES))),
    ]


def weighted(choices: Iterable[tuple[Choice, float]], generator: random.Random) -> Choice:
    found = list(choices)
    chosen, _ = generator.choices(found, [weight for _, weight in found])[0]
    return chosen


def _call(number: int, generator: random.Random) -> Attack:
    """A conversation with a method, distorted."""
    method = weighted(((each, each.weight) for each in METHODS), generator)
    kind = weighted(((name, weight) for name, (_, weight) in DISTORTIONS.items()), generator)
    distort, _ = DISTORTIONS[kind]

    def pieces() -> list[bytes]:
        return distort(method.conversation(generator), generator)

    return _spoken(number, kind, method.role, method.path, generator, pieces)


def _misuse_of_frames(number: int, generator: random.Random) -> Attack:
    """A multiplexed stream with inconsistent frames."""
    role = generator.choice(sorted(CARRIED))
    misuse = generator.choice(MISUSES)
    pieces = partial(misused, misuse, *CARRIED[role], generator)
    return _spoken(number, f"frames: {_words(misuse)}", role, CARRY, generator, pieces)


def _noise(number: int, generator: random.Random) -> Attack:
    """Bytes on a separate connection."""
    role = generator.choice(ROLES)
    noise = generator.choice(HTTP_NOISES if role == "metrics" else NOISES)
    return Attack(number, f"raw: {_words(noise)}", role, generator, partial(noise, generator))


def _spoken(
    number: int, kind: str, role: str, path: str, generator: random.Random, pieces: Callable[[], list[bytes]]
) -> Attack:
    """A call, and its caller's conduct."""
    manner = weighted(((each, CONDUCTS[each].weight) for each in CONDUCTS), generator)
    deadline = generator.choice(CONDUCTS[manner].deadlines)
    metadata = generator.choice(METADATA) if generator.random() < 0.1 else ()
    compression = weighted(((grpc.Compression.NoCompression, 9), (grpc.Compression.Gzip, 1)), generator)
    return Attack(number, kind, role, generator, pieces, path, manner, deadline, metadata, compression)


def _words(function: Callable[..., object]) -> str:
    return function.__name__.replace("_", " ")
