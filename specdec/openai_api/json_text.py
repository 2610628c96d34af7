"""JSON assembled from encoded parts, so that a long answer is encoded as it arrives, not all at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]


def encoded(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def json_object(fields: Mapping[str, object], others: Mapping[str, str]) -> str:
    """Return a JSON object of values to encode and `others` already encoded."""
    parts = {name: encoded(value) for name, value in fields.items()} | dict(others)
    return "{" + ",".join(f"{encoded(name)}:{part}" for name, part in parts.items()) + "}"


def json_list(parts: Iterable[str]) -> str:
    """Return a JSON list of encoded parts."""
    return f"[{','.join(parts)}]"


def as_bytes(text: str) -> bytes:
    """Return the bytes of a JSON text. Lone surrogates, which requests and models may write, become question marks."""
    return text.encode(errors="replace")
