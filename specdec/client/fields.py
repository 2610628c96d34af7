"""Sets fields of messages from what a caller gave."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def put(message: Message, field: str, option: str, value: object) -> None:
    """Set a field of any kind, and say which option it was if the value does not fit: ValueError or TypeError."""
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (ValueError, TypeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        wants_text = message.DESCRIPTOR.fields_by_name[field].type == FieldDescriptor.TYPE_STRING
        # Protobuf names the wanted type of all fields but these.
        problem = "must be text (str)" if wants_text and kind is TypeError else str(error)
        raise kind(f"{option} = {value!r}: {problem}") from error
