"""JSON assembled from encoded parts, so that a long answer is encoded as it arrives, not at its end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

Json = dict[str, Any]


_PLACE = f"encoded {uuid4().hex}"
"""Placeholder that is later replaced by the text of an encoded list. It is random, so no caller can guess it."""


class EncodedList:
    """A list that is encoded as it grows: each value is encoded once, however many answers and events contain it."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def extend(self, values: Iterable[object], *, ascii: bool = False) -> None:
        self._parts += (encoded(value, ascii=ascii) for value in values)

    @property
    def text(self) -> str:
        """The list as JSON."""
        return json_list(self._parts)


def encoded(value: object, *, ascii: bool = False) -> str:
    """Return a value, which may contain encoded lists, as JSON. With `ascii`, non-ASCII characters are escaped, except
    in those lists."""
    found: list[str] = []

    def place(part: object) -> str:
        if not isinstance(part, EncodedList):
            raise TypeError(f"{type(part).__name__} is no JSON")
        found.append(part.text)
        return _PLACE

    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=ascii, default=place)
    if not found:
        return text
    first, *others = text.split(f'"{_PLACE}"')
    return first + "".join(part + other for part, other in zip(found, others, strict=True))


def json_object(fields: Mapping[str, object], others: Mapping[str, str]) -> str:
    """Return a JSON object of `fields`, which are encoded here, and `others`, which are already encoded."""
    parts = {name: encoded(value) for name, value in fields.items()} | dict(others)
    return "{" + ",".join(f"{encoded(name)}:{part}" for name, part in parts.items()) + "}"


def json_list(parts: Iterable[str]) -> str:
    """Return a JSON list of encoded parts."""
    return f"[{','.join(parts)}]"


def as_bytes(text: str) -> bytes:
    """Return the bytes of a JSON text. Lone surrogates, which requests and models may contain, become question
    marks."""
    return text.encode(errors="replace")
