"""Errors in OpenAI's shape, and what becomes of those of the gRPC API."""

from __future__ import annotations

import re
from dataclasses import dataclass
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

FIELDS = {"text": "prompt", "tokens.ids": "prompt", "chat.messages": "messages", "chat": "messages"}
FIELDS |= {"chat.template_arguments": "chat_template_kwargs"}
"""Fields of the gRPC API that have another name here; of others, the message that holds them is left out."""

_INSIDE = re.compile(r"^(sampling|speculation|contrast|chat)\.")


@dataclass(eq=False)
class ApiError(Exception):
    """A request fails; `param` names the field that is wrong, `code` is for machines."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None  # seconds

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 408:  # the rest of the body would be in the way of a next request
            return {"connection": "close"}
        return {} if self.retry_after is None else {"retry-after": f"{self.retry_after:.0f}"}


def refused(param: str, problem: str) -> ApiError:
    """Return the error for a field that is wrong."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def from_specdec(error: SpecdecError) -> ApiError:
    """Return what a caller here sees of an error of the gRPC API."""
    message, code = str(error), error.reason.lower() or error.code.name.lower()
    match error:
        case InvalidRequest():
            found = [(_field(field), problem) for field, problem in error.violations]
            if found:
                message = "; ".join(f"{field}: {problem}" for field, problem in found)
            return ApiError(400, message, param=found[0][0] if found else None, code="invalid_value")
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


def _field(name: str) -> str:
    return FIELDS.get(name) or FIELDS.get(name.partition("[")[0]) or _INSIDE.sub("", name)


def _wait(error: SpecdecError) -> float:
    """Return whole seconds, as the header wants them."""
    return max(1.0, round(error.retry_after or 1.0))
