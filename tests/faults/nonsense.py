"""Callers that say anything: messages of the right type with any content, in any order, and bytes that are none."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, 2, 3, 7, 63, 64, 255, 256, 1000, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))


async def call_with_nonsense(address: str, kind: type[Message], method: str, seed: int) -> Counter[str]:
    """Call again and again, some calls at once, until cancelled; how the calls ended, by status."""
    generator = random.Random(seed)
    ends: Counter[str] = Counter()

    async def say() -> AsyncIterator[bytes]:
        opened = kind()
        opened.open.prompt_tokens.extend([5, 6, 7])  # type: ignore[attr-defined]
        opened.open.max_tokens = 50  # type: ignore[attr-defined]
        sane = generator.random() < 0.5  # at first
        for number in range(generator.randrange(1, 12)):
            if sane and number == 0:
                for penalty in ("repetition_penalty", "top_p"):
                    setattr(opened.open.sampling, penalty, 1.0)  # type: ignore[attr-defined]
                yield opened.SerializeToString()
            elif generator.random() < 0.2:
                yield generator.randbytes(generator.randrange(64))
            else:
                yield filled(kind(), generator).SerializeToString()
            await asyncio.sleep(0.01 * generator.random())

    async def call(stub: Any) -> None:
        while True:
            try:
                async for _ in stub(say(), timeout=2.0):
                    pass
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1

    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = channel.stream_stream(f"/specdec.v1.{method}")  # bytes as they are
        try:
            await asyncio.gather(*(call(stub) for _ in range(4)))
        except asyncio.CancelledError:
            return ends
    return ends


def filled(message: Message, generator: random.Random, depth: int = 0) -> Message:
    """With anything in some of its fields."""
    for field in message.DESCRIPTOR.fields:
        if generator.random() < 0.5 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[generator.choice(NUMBERS)] = generator.choice(FLOATS)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(generator.randrange(6)):
                if field.message_type is not None:
                    filled(values.add(), generator, depth + 1)
                else:
                    values.append(_value(field, generator))
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            filled(part, generator, depth + 1)
        else:
            setattr(message, field.name, _value(field, generator))
    return message


def _value(field: Any, generator: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_FLOAT:
            return generator.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return generator.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return generator.randbytes(generator.randrange(64))
        case FieldDescriptor.CPPTYPE_STRING:
            return "x" * generator.randrange(300)
        case FieldDescriptor.CPPTYPE_ENUM:
            return generator.randrange(5)
        case _:
            return generator.choice(NUMBERS)
