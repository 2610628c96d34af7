"""Sets message fields from a caller's values."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def put(message: Message, field: str, option: str, value: object) -> None:
    """Set a field of any kind; ValueError or TypeError names the option if the value does not fit."""
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    is_number = descriptor.type not in (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_STRING)
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    if is_number and any(isinstance(item, bool) for item in values):  # protobuf would accept True and False as 1 and 0
        raise TypeError(f"{option} = {value!r}: must be a number")
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (ValueError, TypeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        wants_text = descriptor.type == FieldDescriptor.TYPE_STRING
        # Protobuf's own message names the expected type, except for string fields.
        problem = "must be text (str)" if wants_text and kind is TypeError else str(error)
        raise kind(f"{option} = {value!r}: {problem}") from error
