"""Distortions of a conversation: the resulting messages, serialized."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from specdec.serving.validation import MAX_MESSAGE_BYTES
from tests.hostile.mutation import altered, filled, garbled

FLOOD = 200
"""Approximate number of repetitions of a message."""

Distortion = Callable[[Sequence[Message], random.Random], list[bytes]]


def untouched(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    return [message.SerializeToString() for message in said]


def with_changed_fields(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    """One field of each message; the first stays unchanged half of the time, so that there is a session to spoil."""
    spared = int(generator.random() < 0.5 and len(said) > 1)
    changed = [*said[:spared], *(altered(message, generator) for message in said[spared:])]
    return [message.SerializeToString() for message in changed]


def with_any_fields(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    """The same number of messages, with random content."""
    spared = int(generator.random() < 0.5 and len(said) > 1)
    changed = [*said[:spared], *(filled(type(message)(), generator) for message in said[spared:])]
    return [message.SerializeToString() for message in changed]


def with_changed_bytes(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    return [
        garbled(message.SerializeToString(), generator) if generator.random() < 0.5 else message.SerializeToString()
        for message in said
    ]


def of_random_bytes(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    return [generator.randbytes(generator.choice((0, 1, 9, 64, 3000))) for _ in said]


def in_another_order(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    """Shuffled, with some left out and some repeated: `extend` before `open`, `open` twice."""
    found = [message for message in said for _ in range(generator.choice((0, 1, 1, 2)))]
    generator.shuffle(found)
    return [message.SerializeToString() for message in found]


def with_a_flood(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    """One of the messages, a few hundred times in a row."""
    at = generator.randrange(len(said))
    flood = [said[at]] * generator.randrange(FLOOD // 2, FLOOD)
    return [message.SerializeToString() for message in (*said[: at + 1], *flood)]


def too_large(said: Sequence[Message], generator: random.Random) -> list[bytes]:
    """A message above the size limit, or a large one below it; zeros, which compress to little."""
    return [said[0].SerializeToString(), bytes(generator.choice((1 << 20, MAX_MESSAGE_BYTES + 1)))]


DISTORTIONS: dict[str, tuple[Distortion, float]] = {
    "untouched": (untouched, 4),
    "changed fields": (with_changed_fields, 12),
    "any fields": (with_any_fields, 6),
    "changed bytes": (with_changed_bytes, 8),
    "random bytes": (of_random_bytes, 3),
    "another order": (in_another_order, 6),
    "a flood": (with_a_flood, 1),
    "too large": (too_large, 0.1),
}
"""By name, each with its relative frequency."""
