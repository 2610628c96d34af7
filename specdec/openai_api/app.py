"""The routes: what is answered at which address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.client.request_id import REQUEST_ID, is_request_id, new_request_id
from specdec.openai_api.errors import ApiError
from specdec.openai_api.event_stream import EventStream
from specdec.openai_api.gateway import Caller, Gateway
from specdec.openai_api.presence import CallerLeftError, while_present
from specdec.openai_api.requests import parse

log = structlog.get_logger()

COMPLETIONS, CHAT, MODELS, HEALTH = "/v1/completions", "/v1/chat/completions", "/v1/models", "/health"
ROUTES = (COMPLETIONS, CHAT, MODELS, HEALTH)

MOST_BODY = 16 << 20
"""Bytes of a request's body."""

BODY_SECONDS = 30.0
"""Seconds in which a request's body must have come, by default."""

CARRIED = ("authorization", "traceparent", "tracestate")
"""Headers that go on to orchestrators: whose request it is, and of which trace."""


def make_app(gateway: Gateway, serves: Callable[[], Awaitable[bool]], body_seconds: float = BODY_SECONDS) -> ASGIApp:
    """Return the ASGI application. `serves` tells whether an orchestrator takes requests now."""
    started = int(time.time())

    async def generate(request: Request, *, chat: bool) -> JSONResponse | EventStream:
        caller = _caller(request)
        asked = parse(await _body(request, body_seconds), chat=chat)
        named = {REQUEST_ID: caller.request_id}
        if asked.stream:
            return EventStream(await while_present(request.receive, gateway.events(asked, caller)), named)
        return JSONResponse(await while_present(request.receive, gateway.answer(asked, caller)), headers=named)

    async def completions(request: Request) -> JSONResponse | EventStream:
        return await generate(request, chat=False)

    async def chat_completions(request: Request) -> JSONResponse | EventStream:
        return await generate(request, chat=True)

    async def models(request: Request) -> JSONResponse:
        found = [
            {
                "id": each.name,
                "object": "model",
                "created": started,
                "owned_by": "specdec",
                "max_model_len": each.context_tokens,  # as vLLM names it
            }
            for each in await gateway.models(_caller(request))
        ]
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": found})
        for each in found:
            if each["id"] == wanted:
                return JSONResponse(each)
        raise ApiError(404, f"model: {wanted!r} is not served here", param="model", code="model_not_found")

    async def health(_: Request) -> JSONResponse:
        works = await serves()
        return JSONResponse({"status": "ok" if works else "no orchestrator takes requests"}, 200 if works else 503)

    handlers: dict[Any, Any] = {
        ApiError: _told,
        HTTPException: _told_of_http,
        CallerLeftError: _nothing,
        ClientDisconnect: _nothing,
        Exception: _told_of_mistake,
    }
    return _Logged(
        Starlette(
            routes=[
                Route(COMPLETIONS, completions, methods=["POST"]),
                Route(CHAT, chat_completions, methods=["POST"]),
                Route(MODELS, models),
                Route(f"{MODELS}/{{model:path}}", models),
                Route(HEALTH, health),
            ],
            exception_handlers=handlers,
        )
    )


class _Logged:
    """An application whose own mistakes are logged; its caller has been told already."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            log.exception("request_failed", path=scope.get("path"))


def _caller(request: Request) -> Caller:
    """Return who asks; what a gRPC call cannot carry is no key."""
    headers: Mapping[str, str] = request.headers
    given = headers.get(REQUEST_ID)
    request_id = given if given is not None and is_request_id(given) else new_request_id()
    carried = ((name, headers[name]) for name in CARRIED if name in headers)
    return Caller(request_id, tuple((name, value) for name, value in carried if _is_plain(value)))


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


async def _body(request: Request, seconds: float) -> bytes:
    """Read the body; ApiError if it is too long or does not come."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= MOST_BODY:
                    parts.append(part)
                else:  # read to its end all the same: who still sends does not hear what is answered
                    parts.clear()
    except TimeoutError:
        raise ApiError(408, f"the body has not come within {seconds:g} s", code="body_late") from None
    if size > MOST_BODY:
        raise ApiError(413, f"the body is longer than {MOST_BODY >> 20} MiB", code="body_too_long")
    return b"".join(parts)


async def _told(_: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _told_of_http(request: Request, error: HTTPException) -> JSONResponse:
    what = {404: f"{request.url.path}: nothing is served here", 405: f"{request.method} is not allowed here"}
    message = what.get(error.status_code, error.detail)
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)


async def _told_of_mistake(_: Request, __: Exception) -> JSONResponse:
    error = ApiError(500, "internal error, see the log of the server", "server_error", code="internal")
    return JSONResponse(error.body, error.status)


async def _nothing(_: Request, __: Exception) -> Nobody:
    return Nobody()


class Nobody:
    """The answer to a caller who has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""
