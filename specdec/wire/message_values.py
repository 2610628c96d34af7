"""A message as plain values: fields by name, numbers as numbers."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_LONG = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
"""Types that MessageToDict converts to strings, because JavaScript's numbers cannot hold 64 bits."""


def values_of(message: Message) -> dict[str, Any]:
    """Return a message's fields by name, in MessageToDict's form and the order of their declaration, but keeping
    numbers as numbers."""
    found = MessageToDict(message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
    return _with_numbers(message.DESCRIPTOR, found)


def _with_numbers(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {field.name: _with_number(field, found[field.name]) for field in kind.fields if field.name in found}


def _with_number(field: Any, value: Any) -> Any:
    inner = field.message_type
    if field.type in _LONG:
        return int(value)
    if inner is None:
        return value
    if inner.GetOptions().map_entry:
        return {key: _with_number(inner.fields_by_name["value"], item) for key, item in value.items()}
    return [_with_numbers(inner, item) for item in value] if isinstance(value, list) else _with_numbers(inner, value)
