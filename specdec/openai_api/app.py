"""The HTTP routes and the middleware around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec import __version__
from specdec.api_keys import bearer_key
from specdec.client import Model
from specdec.openai_api.anthropic_answer import error_body
from specdec.openai_api.bodies import BODY_SECONDS, Bodies, Unread
from specdec.openai_api.callers import Callers, network_of
from specdec.openai_api.endpoints import Messages, Responses
from specdec.openai_api.errors import ApiError, overloaded, shutting_down, too_many
from specdec.openai_api.event_stream import IGNORED_HEADER, MISTAKE, EventStream, ignored_header
from specdec.openai_api.gateway import Caller, Gateway
from specdec.openai_api.json_text import Json
from specdec.openai_api.page_files import page_routes
from specdec.openai_api.parsing import Intake, Parser
from specdec.openai_api.presence import CallerLeftError, while_present
from specdec.openai_api.requests import parse_fields
from specdec.openai_api.response_store import ResponseStore
from specdec.openai_api.routes import (
    ALIASES,
    CANCEL,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    DOCS,
    HEALTH,
    INPUTS,
    ITEM,
    LIVE,
    MESSAGE_TOKENS,
    MESSAGES,
    METRICS,
    MODELS,
    OPENAPI,
    PAGE_HEADERS,
    PING,
    RESPONSE_TOKENS,
    RESPONSES,
    STATS,
    TOKENIZE,
    VERSION,
    advice,
    openapi,
    page,
)
from specdec.openai_api.tokens import Tokens
from specdec.serving.errors import OverloadedError, TenantLimitError
from specdec.serving.propagation import trace_context_of
from specdec.wire.request_metadata import REQUEST_ID, is_request_id, new_request_id

log = structlog.get_logger()

KEY_HEADERS = ("x-api-key", "api-key")
"""Headers in which Anthropic's and Azure's clients send the API key."""

MAX_KEY_CHARACTERS = 4096
"""Maximum characters of an `authorization` header: gRPC limits the metadata of a call to some 8 KiB."""

CALLER = "specdec.caller"
"""ASGI scope key for an admitted request's caller."""

MAX_PATH_CHARACTERS = 200
"""Maximum characters of an unknown path in an error message."""

TOLD = (REQUEST_ID, "retry-after", IGNORED_HEADER)
"""Response headers exposed to pages in browsers."""


def make_app(
    gateway: Gateway,
    serves: Callable[[], Awaitable[bool]],
    *,
    most_requests: int,
    body_seconds: float = BODY_SECONDS,
    origins: Sequence[str] = (),
    with_page: bool = False,
    with_stats: bool = False,
    store: ResponseStore | None = None,
    strict: bool = False,
    metrics: Callable[[], bytes] | None = None,
) -> ASGIApp:
    """Return the ASGI application. `serves` returns whether an orchestrator accepts requests now. `most_requests`
    limits the requests in progress. Pages of `origins` may send requests from browsers. Without `store`, no responses
    are stored. With `strict`, unknown fields are refused. `with_page` serves the page, `with_stats` the statistics of
    the pods. `metrics` returns this server's metrics in Prometheus's text format, for admitted callers; None: they are
    not served here."""
    started = int(time.time())
    admission = Middleware(_Admission, callers=Callers(gateway.check_key, most_requests))

    def who(request: Request) -> tuple[Caller, str]:
        return _caller(request), request.scope[CALLER]

    intake = Intake(Parser(), Bodies(body_seconds), who, strict)
    responses = Responses(gateway, intake, store)
    messages = Messages(gateway, intake)
    tokens = Tokens(gateway, intake)

    async def generate(request: Request, *, chat: bool) -> Response | EventStream:
        taken = await intake.take(request, partial(parse_fields, chat=chat))
        parsed, caller = taken.request, taken.caller
        told = ignored_header(parsed.ignored)
        if parsed.stream:
            events = await while_present(request.receive, gateway.events(parsed, caller))
            return EventStream(events, headers=told)
        answer = await while_present(request.receive, gateway.answer(parsed, caller))
        return Response(answer, headers=told, media_type="application/json")

    async def completions(request: Request) -> Response | EventStream:
        return await generate(request, chat=False)

    async def chat_completions(request: Request) -> Response | EventStream:
        return await generate(request, chat=True)

    async def models(request: Request) -> JSONResponse:
        def entry(model: Model, name: str) -> Json:
            constant = {"object": "model", "created": started, "owned_by": "specdec"}
            return {"id": name, **constant, "max_model_len": model.context_tokens}  # vLLM's field

        told = await while_present(request.receive, gateway.models(_caller(request)))
        wanted = request.path_params.get("model")
        if wanted is None:
            found = [entry(model, name) for model in told for name in (model.name, *model.aliases)]
            return JSONResponse({"object": "list", "data": found})
        for model in told:
            if model.is_asked_as(wanted):
                return JSONResponse(entry(model, wanted))
        raise ApiError(404, f"model: {wanted!r} is not served here", param="model", code="model_not_found")

    async def stats(request: Request) -> JSONResponse:
        found = await while_present(request.receive, gateway.stats(_caller(request)))
        return JSONResponse(found, headers={"cache-control": "no-store"})

    async def health(_: Request) -> JSONResponse:
        works = await serves()
        return JSONResponse({"status": "ok" if works else "no orchestrator is available"}, 200 if works else 503)

    async def live(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def version(_: Request) -> JSONResponse:
        return JSONResponse({"version": __version__})

    async def scraped(_: Request) -> Response:
        if metrics is None:
            raise ApiError(404, f"{METRICS}: is not served here, see --serve-metrics and --metrics-port")
        return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    generating = {COMPLETIONS: completions, CHAT: chat_completions}
    described, shown = openapi(), page()

    async def description(_: Request) -> JSONResponse:
        return JSONResponse(described)

    async def docs(_: Request) -> HTMLResponse:
        return HTMLResponse(shown, headers=PAGE_HEADERS)

    handlers: dict[Any, Any] = {
        ApiError: _answer_error,
        OverloadedError: _answer_overloaded,
        HTTPException: _answer_http_error,
        CallerLeftError: _answer_nothing,
        ClientDisconnect: _answer_nothing,
        Exception: _answer_mistake,
    }

    def for_browsers(answering: ASGIApp) -> ASGIApp:
        if not origins:
            return answering
        return CORSMiddleware(
            answering, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=TOLD
        )

    app = Starlette(
        routes=[
            *(
                Route(path, generating[stands_for], methods=["POST"], middleware=[admission])
                for path, stands_for in [(path, path) for path in generating] + list(ALIASES.items())
            ),
            Route(RESPONSES, responses.create, methods=["POST"], middleware=[admission]),
            Route(RESPONSE_TOKENS, responses.count_tokens, methods=["POST"], middleware=[admission]),
            Route(ITEM, responses.retrieve, methods=["GET"], middleware=[admission]),
            Route(ITEM, responses.delete, methods=["DELETE"], middleware=[admission]),
            Route(INPUTS, responses.input_items, middleware=[admission]),
            Route(CANCEL, responses.cancel, methods=["POST"], middleware=[admission]),
            Route(MESSAGES, messages.create, methods=["POST"], middleware=[admission]),
            Route(MESSAGE_TOKENS, messages.count_tokens, methods=["POST"], middleware=[admission]),
            *([Route(STATS, stats, middleware=[admission])] if with_stats else []),
            *(page_routes() if with_page else []),
            Route(MODELS, models, middleware=[admission]),
            Route(f"{MODELS}/{{model:path}}", models, middleware=[admission]),
            Route(TOKENIZE, tokens.tokenize, methods=["POST"], middleware=[admission]),
            Route(DETOKENIZE, tokens.detokenize, methods=["POST"], middleware=[admission]),
            Route(METRICS, scraped, middleware=[admission]),
            Route(VERSION, version, middleware=[admission]),
            Route(OPENAPI, description, middleware=[admission]),
            Route(DOCS, docs, middleware=[admission]),
            Route(HEALTH, health),
            Route(PING, health, methods=["GET", "POST"]),
            Route(LIVE, live),
        ],
        exception_handlers=handlers,
    )
    return _Outermost(app, for_browsers)


class _Admission:
    """Admits requests by their headers, before any of the body is read."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        authorization = dict(_caller(request).metadata).get("authorization", "")
        network = network_of("" if request.client is None else request.client.host)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:  # from an orchestrator
                self._callers.refused(str(authorization))
            await send(message)

        async with self._callers.admitted(scope, str(authorization), network) as scope[CALLER]:
            await self._app(scope, receive, watched)


class _Outermost:
    """The outermost layer. It assigns request ids for answers and logs, answers requests cut off at the end of a drain,
    and closes connections with unread bodies."""

    def __init__(self, app: Starlette, for_browsers: Callable[[ASGIApp], ASGIApp]) -> None:
        """`for_browsers` adds the headers without which a browser keeps an answer from its page. It is applied outside
        Starlette, whose answers to unexpected exceptions bypass its own middleware."""
        self._app = for_browsers(app)
        self._for_browsers = for_browsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Request(scope).headers.get(REQUEST_ID)
        request_id = given if given is not None and is_request_id(given) else new_request_id()
        scope[REQUEST_ID] = request_id
        body = Unread(scope, receive)
        begun = closes = False

        async def naming(message: Message) -> None:
            nonlocal begun, closes
            if message["type"] == "http.response.start":
                await body.skip_if_small()
                begun, closes = True, body.left
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                if scope["path"].startswith(MESSAGES):
                    MutableHeaders(scope=message)["request-id"] = request_id  # Anthropic's name
                if closes:  # otherwise the unread body would be parsed as the next request
                    MutableHeaders(scope=message)["connection"] = "close"
            elif closes and not message.get("more_body"):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, body.receive, naming)
            except asyncio.CancelledError:  # by the server, at the drain's deadline
                log.warning("cut_off", path=scope["path"])
                if not begun:
                    answer = self._for_browsers(_answered(Request(scope), shutting_down()))
                    await answer(scope, body.receive, naming)
            except Exception:  # already answered, where possible
                log.exception("request_failed", path=scope["path"])


def _caller(request: Request) -> Caller:
    """Return the caller. A key that gRPC metadata cannot carry is dropped: it cannot be valid. So is a trace context
    that orchestrators would ignore."""
    given = request.headers.get("authorization")
    keys = [request.headers[name] for name in KEY_HEADERS if name in request.headers]
    if given is not None:
        given = normal_form(given)
    elif keys:
        given = f"Bearer {keys[0]}"
    sound = given is not None and len(given) <= MAX_KEY_CHARACTERS and given.isascii() and given.isprintable()
    key = (("authorization", str(given)),) if sound else ()
    return Caller(request.scope[REQUEST_ID], key + trace_context_of(request.headers))


def normal_form(authorization: str) -> str:
    """Return the normal form of an `authorization` header, so that all its spellings count as one caller."""
    key = bearer_key(authorization)
    return authorization if key is None else f"Bearer {key}"


def _answered(request: Request, error: ApiError) -> JSONResponse:
    """Return the answer to a failed request, in the format of the request's API."""
    body = error.body
    if request.url.path.startswith(MESSAGES):
        body = error_body(error, request.scope[REQUEST_ID])
    return JSONResponse(body, error.status, error.headers)


async def _answer_error(request: Request, error: ApiError) -> JSONResponse:
    return _answered(request, error)


async def _answer_overloaded(request: Request, error: OverloadedError) -> JSONResponse:
    if isinstance(error, TenantLimitError):
        return _answered(request, too_many("too many of your requests are waiting for this server"))
    return _answered(request, overloaded(str(error)))


async def _answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Answer an unknown route or a wrong method."""
    path, allowed = request.url.path, (error.headers or {}).get("Allow", "")
    what = {
        404: f"{path[:MAX_PATH_CHARACTERS]}: there is no such endpoint: {advice(path)}",
        405: f"{request.method} is not allowed for this endpoint" + (allowed and f": use {allowed}"),
    }
    answer = _answered(request, ApiError(error.status_code, what.get(error.status_code, error.detail)))
    answer.headers.update(error.headers or {})
    return answer


async def _answer_mistake(request: Request, __: Exception) -> JSONResponse:
    """Answer an unexpected exception. Starlette re-raises it, so that it is logged."""
    return _answered(request, MISTAKE)


async def _answer_nothing(_: Request, __: Exception) -> NoResponse:
    return NoResponse()


class NoResponse:
    """The empty response to a disconnected caller."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""
