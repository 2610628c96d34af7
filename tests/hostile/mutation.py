"""Invalid messages: of the right type with any content, valid ones with a field changed, and undecodable bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, 2, 3, 7, 63, 64, 255, 256, 319, 320, 1000, 2**31 - 1, 2**31, 2**32 - 1)
LARGE_NUMBERS = (*NUMBERS, 2**53, 2**63, 2**64 - 1)
SIGNED_NUMBERS = (0, 1, -1, 2, 255, -(2**31), 2**31 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3e38, float("nan"), float("inf"), float("-inf"))
STRINGS = (
    "",
    "x",
    "\x00",
    "\n{}\r\n",
    "../../etc/passwd",
    "%s%n{0}${x}",
    "\u202e\u0301\ufeff",
    "\U0001f469\u200d\U0001f680",
    "\ufffe\uffff\U0010ffff",
    "{{ 7 * 7 }}{% for x in y %}",
    "é" * 300,
    "z" * 5000,
    "w " * 50_000,
)
SIZES = (1, 2, 5, 17, 64, 1025)
MAX_DEPTH = 4

VALUES: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.CPPTYPE_FLOAT: lambda generator: generator.choice(FLOATS),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda generator: generator.choice(FLOATS),
    FieldDescriptor.CPPTYPE_BOOL: lambda generator: generator.random() < 0.5,
    FieldDescriptor.CPPTYPE_ENUM: lambda generator: generator.choice((0, 1, 2, 3, 4, 99, -1, 2**31 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: lambda generator: generator.choice(LARGE_NUMBERS),
    FieldDescriptor.CPPTYPE_UINT32: lambda generator: generator.choice(NUMBERS),
    FieldDescriptor.CPPTYPE_INT32: lambda generator: generator.choice(SIGNED_NUMBERS),
    FieldDescriptor.CPPTYPE_INT64: lambda generator: generator.choice(SIGNED_NUMBERS),
    FieldDescriptor.CPPTYPE_STRING: lambda generator: generator.choice(STRINGS),
}
"""A random value of a field of this type; extremes are likely."""


def filled(message: Message, generator: random.Random, depth: int = 0) -> Message:
    """Fill some of a message's fields at random."""
    for field in message.DESCRIPTOR.fields:
        if depth <= MAX_DEPTH and generator.random() < 0.5:
            _fill(message, field, generator, depth)
    return message


def altered(message: Message, generator: random.Random) -> Message:
    """Copy a message and change one field at random, of itself or of a sub-message."""
    changed = type(message)()
    changed.CopyFrom(message)
    _alter(changed, generator)
    return changed


def garbled(data: bytes, generator: random.Random) -> bytes:
    """Change a serialized message: bits flipped, bytes cut out, inserted, repeated."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 8))):
        start = generator.randrange(len(changed) + 1)
        end = min(len(changed), start + generator.randrange(1, 17))
        match generator.randrange(5):
            case 0 if start < len(changed):
                changed[start] ^= 1 << generator.randrange(8)
            case 1:
                del changed[start:end]
            case 2:
                changed[start:start] = generator.randbytes(end - start or 4)
            case 3:
                changed[start:start] = changed[start:end] * generator.randrange(1, 20)
            case _:
                del changed[start:]
    return bytes(changed)


def _alter(message: Message, generator: random.Random) -> None:
    """Descend into a sub-message, if any, most of the time; prefer fields that are set."""
    if not message.DESCRIPTOR.fields:
        return
    present = [field for field, _ in message.ListFields()]
    parts = [field for field in present if _is_message(field)]
    if parts and generator.random() < 0.7:
        field = generator.choice(parts)
        value = getattr(message, field.name)
        _alter(generator.choice(value) if field.is_repeated else value, generator)
        return
    fields: list[Any] = present if present and generator.random() < 0.6 else list(message.DESCRIPTOR.fields)
    chosen = generator.choice(fields)
    match generator.randrange(4):
        case 0:
            message.ClearField(chosen.name)
        case 1 if chosen.is_repeated and not _is_map(chosen):
            _repeat(getattr(message, chosen.name), generator)
        case _:
            _fill(message, chosen, generator, depth=MAX_DEPTH - 1)


def _repeat(values: Any, generator: random.Random) -> None:
    """Repeat the present values many times."""
    kept = list(values)[:50]
    for _ in range(generator.choice(SIZES)):
        values.extend(kept)


def _fill(message: Message, field: Any, generator: random.Random, depth: int) -> None:
    if _is_map(field):
        _fill_map(getattr(message, field.name), field, generator)
    elif field.is_repeated:
        _fill_repeated(getattr(message, field.name), field, generator, depth)
    elif field.message_type is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        filled(part, generator, depth + 1)
    else:
        setattr(message, field.name, _value(field, generator))


def _fill_map(values: Any, field: Any, generator: random.Random) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(generator.choice(SIZES[:4])):
        if value.message_type is None:
            values[_value(key, generator)] = _value(value, generator)


def _fill_repeated(values: Any, field: Any, generator: random.Random, depth: int) -> None:
    if field.message_type is not None:
        for _ in range(generator.randrange(6)):
            filled(values.add(), generator, depth + 1)
    else:
        values.extend(_value(field, generator) for _ in range(generator.choice(SIZES)))


def _value(field: Any, generator: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return generator.randbytes(generator.choice(SIZES))
    return VALUES[field.cpp_type](generator)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_message(field: Any) -> bool:
    return field.message_type is not None and not _is_map(field)
