"""The routes: their paths, their description as OpenAPI and as a page, and advice on unknown paths."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape

from specdec import __version__
from specdec.openai_api import anthropic_request, responses_request
from specdec.openai_api.fields import CHAT_FIELDS, COMPLETION_FIELDS
from specdec.openai_api.json_text import Json

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MESSAGE_TOKENS, RESPONSE_TOKENS = f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HEALTH, PING, LIVE, METRICS = "/health", "/ping", "/live", "/metrics"
VERSION, OPENAPI, DOCS = "/version", "/openapi.json", "/docs"
HOME, STATS = "/", "/v1/specdec/stats"

PROBES = (HEALTH, PING, LIVE)
"""Routes for probes, open to everyone."""

ALIASES = {"/completions": COMPLETIONS, "/chat/completions": CHAT}
"""Paths without a version, as in llama.cpp, mapped to their routes."""

ITEM, INPUTS, CANCEL = (f"{RESPONSES}/{{response}}{rest}" for rest in ("", "/input_items", "/cancel"))
MODEL = f"{MODELS}/{{model}}"

OF_TOKENIZE = frozenset(
    {
        "add_generation_prompt",
        "add_special",
        "add_special_tokens",
        "chat_template_kwargs",
        "content",
        "continue_final_message",
        "messages",
        "model",
        "parse_special",
        "prompt",
        "return_token_strs",
        "tools",
        "with_pieces",
    }
)
OF_DETOKENIZE = frozenset({"model", "tokens"})


@dataclass(frozen=True)
class Described:
    """A route: its path and method, its answer, and the fields of its body."""

    path: str
    method: str
    answer: str
    fields: Collection[str] = ()


_OF_RESPONSES = responses_request.SAME | responses_request.READ
_OF_MESSAGES = anthropic_request.SAME | anthropic_request.READ

DESCRIBED = (
    Described(COMPLETIONS, "post", "Completions of prompts, whole or as events.", COMPLETION_FIELDS),
    Described(CHAT, "post", "The next message of a conversation, whole or as events.", CHAT_FIELDS),
    Described(RESPONSES, "post", "A response, whole or as typed events.", _OF_RESPONSES),
    Described(RESPONSE_TOKENS, "post", f"The number of input tokens of a {RESPONSES} request.", _OF_RESPONSES),
    Described(ITEM, "get", "A stored response."),
    Described(ITEM, "delete", "Deletes a stored response."),
    Described(INPUTS, "get", "The input items of a stored response."),
    Described(
        CANCEL,
        "post",
        "Always an error, since background responses are not supported: close the connection instead.",
    ),
    Described(MESSAGES, "post", "A message of Anthropic's API, whole or as events.", _OF_MESSAGES),
    Described(MESSAGE_TOKENS, "post", f"The number of input tokens of a {MESSAGES} request.", _OF_MESSAGES),
    Described(MODELS, "get", "The served models."),
    Described(MODEL, "get", "A served model."),
    Described(TOKENIZE, "post", "The tokens of a text or a conversation.", OF_TOKENIZE),
    Described(DETOKENIZE, "post", "The text of tokens.", OF_DETOKENIZE),
    Described(HEALTH, "get", "200 while an orchestrator takes requests, else 503."),
    Described(PING, "get", "The same as /health."),
    Described(LIVE, "get", "200 while this server answers."),
    Described(METRICS, "get", "Prometheus metrics of this server, with --serve-metrics."),
    Described(VERSION, "get", "The version of this server."),
    Described(OPENAPI, "get", "The routes as an OpenAPI document."),
    Described(DOCS, "get", "The routes as a page."),
    Described(HOME, "get", "A page that shows speculation, with --page."),
    Described(STATS, "get", "Statistics of an orchestrator and its pods, with --serve-metrics."),
    *(Described(alias, "post", f"The same as {path}.") for alias, path in ALIASES.items()),
)

ROUTES = tuple(dict.fromkeys(route.path for route in DESCRIBED if "{" not in route.path))
"""The paths without variables."""

_NO_VECTORS = "the models here write text, and no vectors or scores"
_OF_AGENTS = "send the whole conversation to /v1/chat/completions, or use /v1/responses"
_NO_FILES = "prompts are text in the request's body"

NOT_SERVED = {
    "/v1/embeddings": _NO_VECTORS,
    "/embeddings": _NO_VECTORS,
    "/v1/rerank": _NO_VECTORS,
    "/rerank": _NO_VECTORS,
    "/score": _NO_VECTORS,
    "/v1/score": _NO_VECTORS,
    "/pooling": _NO_VECTORS,
    "/classify": _NO_VECTORS,
    "/v1/moderations": _NO_VECTORS,
    "/v1/images/generations": "models are text-only here",
    "/v1/audio/speech": "models are text-only here",
    "/v1/audio/transcriptions": "models are text-only here",
    "/v1/files": _NO_FILES,
    "/v1/batches": "send up to 64 prompts in one request to /v1/completions",
    "/v1/assistants": _OF_AGENTS,
    "/v1/threads": _OF_AGENTS,
    "/v1/complete": "use /v1/messages",
    "/completion": "use /v1/completions",
    "/generate": "use /v1/completions",
    "/infill": "use /v1/completions, with the model's own marks in the prompt",
    "/apply-template": "POST /tokenize with messages returns the tokens of the rendered prompt",
    "/props": "GET /v1/models has the context of each model",
    "/slots": "GET /metrics has the running requests",
    "/load": "GET /metrics has the running requests",
    "/tokenizer_info": "POST /tokenize uses the model's tokenizer",
    "/api/chat": "use /v1/chat/completions",
    "/api/generate": "use /v1/completions",
    "/api/tags": "use /v1/models",
    "/v1/load_lora_adapter": "LoRA adapters are not supported",
    "/v1/unload_lora_adapter": "LoRA adapters are not supported",
}
"""Paths of other servers, and what to do instead."""

MAX_COMPARED = 128
"""Maximum characters of an unknown path that is compared with the routes."""


def advice(path: str) -> str:
    """Return advice about an unknown path."""
    plain = path.rstrip("/")
    if plain in NOT_SERVED:
        return NOT_SERVED[plain]
    for prefix in ("/v1", "/openai", "/api"):
        rest = plain.removeprefix(prefix)
        if rest != plain and (rest in ROUTES or f"/v1{rest}" in ROUTES):
            route = rest if rest in ROUTES else f"/v1{rest}"
            return f"use {route}; check the base URL: it may contain {prefix} twice, or needlessly"
    near = difflib.get_close_matches(plain, ROUTES, 1, 0.75) if len(plain) <= MAX_COMPARED else []
    return f"did you mean {near[0]}?" if near else f"GET {DOCS} lists them"


def openapi() -> Json:
    """Return the routes as an OpenAPI document. Fields have no schemas: values are checked when used."""
    paths: dict[str, Json] = {}
    for route in DESCRIBED:
        operation: Json = {
            "summary": route.answer,
            "responses": {"200": {"description": route.answer}, "default": {"description": "An error."}},
        }
        if variables := re.findall(r"{(\w+)}", route.path):
            text = {"type": "string"}
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": text} for name in variables
            ]
        if route.fields:
            schema = {"type": "object", "properties": {name: {} for name in sorted(route.fields)}}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(route.path, {})[route.method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
"""Headers of the page at `/docs`, which loads no resources."""

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "h2{font:600 1rem ui-monospace,monospace;margin:1.5rem 0 0}p{margin:.2rem 0}code{font-size:.9rem}"
)


def page() -> str:
    """Return the routes as a self-contained HTML page."""
    return "".join(
        (
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
            f"<title>specdec {escape(__version__)}</title><style>{_STYLE}</style>",
            f"<h1>specdec {escape(__version__)}</h1><p>The same for programs: <a href='{OPENAPI}'>{OPENAPI}</a>.",
            *_sections(),
            "</html>",
        )
    )


def _sections() -> Iterator[str]:
    for route in DESCRIBED:
        yield f"<h2>{route.method.upper()} {escape(route.path)}</h2><p>{escape(route.answer)}"
        if route.fields:
            yield f"<p>Fields: {', '.join(f'<code>{escape(name)}</code>' for name in sorted(route.fields))}."
