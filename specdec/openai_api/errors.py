"""Errors in OpenAI's format, and the mapping from gRPC errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from specdec.client import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    SpecdecError,
    Unavailable,
    Unimplemented,
)

MAX_MESSAGE_CHARACTERS = 1024
"""Maximum characters of an error message, which may quote input."""

MAX_VALUE_CHARACTERS = 100
"""Maximum characters of a value in an error message."""

_GROUP = re.compile(r"^(sampling|speculation|contrast|typicality|chat)\.")
"""Prefixes of gRPC fields that are top-level fields in these APIs."""

_MESSAGE = re.compile(r"messages\[(\d{1,9})\]")
_PART_END = re.compile(r"(?=[.\[])|$")


@dataclass(eq=False)
class ApiError(Exception):
    """A failed request. `param` names the invalid field, `code` is machine-readable."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

    @property
    def body(self) -> dict[str, Any]:
        message, param = _sound(self.message), None if self.param is None else _sound(self.param)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def refused(param: str, problem: str) -> ApiError:
    """Return the error for an invalid field."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def wrong(param: str, value: object, wanted: str) -> ApiError:
    """Return the error for a field or list entry whose value is not `wanted`; None stands for a missing field."""
    missing = value is None and not param.endswith("]")  # a list entry is null, not missing
    return refused(param, f"is {'missing' if missing else _shown(value)}, must be {wanted}")


def unsupported(param: str, problem: str = "is not supported") -> ApiError:
    """Return the error for a known but unsupported field."""
    return ApiError(400, f"{param}: {problem}", param=param, code="unsupported_parameter")


def unknown(param: str, problem: str = "unknown parameter") -> ApiError:
    """Return the error for an unknown field."""
    return ApiError(400, f"{param}: {problem}", param=param, code="unknown_parameter")


def renamed(error: ApiError, places: Sequence[str], names: Mapping[str, str]) -> ApiError:
    """Return a chat's error with another API's names: `places` are that API's names for the messages, `names` maps
    other fields."""
    if error.param is None or not error.message.startswith(error.param):
        return error
    param = _placed(error.param, places) or _field(error.param, names)
    return replace(error, message=param + error.message[len(error.param) :], param=param)


def overloaded(message: str) -> ApiError:
    """Return the error for a server without room."""
    return ApiError(503, message, "overloaded_error", code="overloaded", retry_after=1)


def shutting_down() -> ApiError:
    return overloaded("the server is shutting down: use another one")


def too_many(message: str, seconds: float = 1.0) -> ApiError:
    """Return the error for a caller at its limit; `seconds`: how long to wait before a retry."""
    wait = max(1, math.ceil(seconds))
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=wait)


def from_specdec(
    error: SpecdecError, names: Mapping[str, str] = MappingProxyType({}), places: Sequence[str] = ()
) -> ApiError:
    """Map an error of the gRPC API to an HTTP error. `names` maps the gRPC API's fields to the caller's names; `places`
    are the caller's names for a chat's messages."""
    message, code = str(error), error.reason.lower() or error.code.name.lower()
    match error:
        case InvalidRequest():
            placed = [
                (_placed(_GROUP.sub("", field), places) or _field(field, names), problem)
                for field, problem in error.violations
            ]
            found = list(dict.fromkeys(placed))  # two fields may map to the same name
            if found:
                message = "; ".join(f"{field}: {problem}" for field, problem in found)
            code = "context_length_exceeded" if error.reason == "PROMPT_TOO_LONG" else "invalid_value"
            if error.reason == "PROMPT_TOO_LONG":  # litellm and LangChain look for these phrases
                message += " (exceeds the available context size: context_length_exceeded)"
            return ApiError(400, message, param=found[0][0] if found else None, code=code)
        case NotFound():
            return ApiError(404, message, param="model", code="model_not_found")
        case AccessDenied() if error.code.name == "UNAUTHENTICATED":
            return ApiError(401, message, "authentication_error", code="invalid_api_key")
        case AccessDenied():
            return ApiError(403, message, "permission_error", code=code)
        case Overloaded() if error.reason == "TENANT_LIMIT":
            return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=_wait(error))
        case Overloaded():
            return ApiError(503, message, "overloaded_error", code=code, retry_after=_wait(error))
        case Unavailable() | Cancelled():
            return ApiError(503, message, "service_unavailable_error", code=code, retry_after=_wait(error))
        case DeadlineExceeded():
            return ApiError(504, message, "timeout_error", code=code)
        case Unimplemented():
            return ApiError(501, message, "not_implemented_error", code=code)
        case _:
            return ApiError(500, message, "server_error", code=code)


def _field(name: str, names: Mapping[str, str]) -> str:
    """Return the caller's name for a field: `sampling.top_p` is `top_p`, `stop_tokens[3]` may be `stop_token_ids[3]`.
    `names` may map a prefix of the field; the longest match counts."""
    bare = _GROUP.sub("", name)
    for end in sorted((part.start() for part in _PART_END.finditer(bare)), reverse=True):
        if bare[:end] in names:
            return names[bare[:end]] + bare[end:]
    return bare


def _placed(text: str, places: Sequence[str]) -> str:
    """Return a text with the chat message's name at its start replaced by the caller's; empty for other starts."""
    found = _MESSAGE.match(text)
    known = found is not None and int(found[1]) < len(places)
    return places[int(found[1])] + text[found.end() :] if found is not None and known else ""


def _shown(value: object) -> str:
    """Return a value for an error. Only the type of a list or object is shown: encoding a large one would delay other
    requests."""
    match value:
        case dict():
            return "an object" if value else "an empty object"
        case list():
            return "a list" if value else "an empty list"
        case str():
            return json.dumps(_cut(value), ensure_ascii=False)
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "..."


def _wait(error: SpecdecError) -> int:
    """Return the retry delay in whole seconds, for the header."""
    return max(1, math.ceil(error.retry_after or 1.0))


def _sound(text: str) -> str:
    """Return the text, truncated and encodable: JSON input may contain lone surrogates."""
    return text[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
