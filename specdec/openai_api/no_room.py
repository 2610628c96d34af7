"""Answers of a server that has too many connections: to health checks, lest it be taken for a dead one; 503 to all
else."""

from __future__ import annotations

import json

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.openai_api.app import HEALTH
from specdec.openai_api.errors import overloaded

MOST_HEARD = 64
"""Connections too many whose request is heard; further ones are refused without."""

_BODY = json.dumps(overloaded("there are too many connections").body).encode()
_HEADERS = (
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"retry-after", b"1"),
)

REFUSAL = b"".join(
    (
        b"HTTP/1.1 503 Service Unavailable\r\n",
        *(name + b": " + value + b"\r\n" for name, value in (*_HEADERS, (b"connection", b"close"))),
        b"\r\n",
        _BODY,
    )
)
"""The answer to a connection whose request is not heard."""


def health_alone(app: ASGIApp) -> ASGIApp:
    """Return the application of a connection too many, which serves one request."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if scope["method"] in ("GET", "HEAD") and scope["path"] == HEALTH:
            await app(scope, receive, closing)
        else:
            await closing({"type": "http.response.start", "status": 503, "headers": [*_HEADERS]})
            await closing({"type": "http.response.body", "body": _BODY})

    return answer
