"""HTTP requests that no client sends to an OpenAI API: bodies of any content, and bytes that break HTTP's rules."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from specdec.openai_api.fields import READ, RENAMED, SAME, UNSUPPORTED, WITHOUT_EFFECT
from specdec.openai_api.requests import OWN
from tests.hostile.mutation import FLOATS, SIGNED_NUMBERS, STRINGS

FIELDS = sorted(
    {"\ud800", "input", "instructions", "text", "reasoning", "include", "truncation", "system", "thinking"}
    | SAME
    | RENAMED.keys()
    | READ
    | UNSUPPORTED.keys()
    | WITHOUT_EFFECT
    | {"other", ""}
)
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
PATHS = (*ROUTES, "/v1/models", "/v1/models/x", "/health", "/", "/v1", "/v1/models/%00%ff%2e%2e", "/" + "x" * 3000, "*")
METHODS = ("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "CONNECT", "x" * 500)


NO_OBJECTS = (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"", b"\x1f\x8b\x08", b'{"seed":1e999}')


def value(generator: random.Random, depth: int = 0) -> Any:
    """Return any JSON value; extremes are likely."""
    kind = generator.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return generator.choice((None, True, False))
    if kind in (1, 2):
        return generator.choice((*SIGNED_NUMBERS, 2**64, -(2**70), 10**300))
    if kind == 3:
        return generator.choice([each for each in FLOATS if each == each and abs(each) != float("inf")])
    if kind in (4, 5):
        return generator.choice((*STRINGS, "\ud800"))
    if kind == 6:
        return [value(generator, depth + 1) for _ in range(generator.randrange(4))]
    return {generator.choice(("role", "content", "type", "text", "x")): value(generator, depth + 1) for _ in range(3)}


SHAPES: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda generator: {"response_format": {"type": "json_schema", "json_schema": {"schema": value(generator)}}},
    lambda _: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
    lambda generator: {
        "structured_outputs": {generator.choice(("json", "regex", "choice", "grammar")): value(generator)}
    },
    lambda _: {"structured_outputs": {"regex": "((a{1,900}){1,900}){1,900}"}},
    lambda generator: {"structured_outputs": {"regex": "x" * generator.choice((1, 200_000))}},
    lambda _: {"structured_outputs": {"grammar": "start: start start | "}},
    lambda generator: {"tools": [{"type": "function", "function": {"name": "f", "parameters": value(generator)}}]},
    lambda generator: {"tools": value(generator), "tool_choice": value(generator)},
)
"""Fields that request a text in some form, or tool calls."""


def body(generator: random.Random) -> bytes:
    """Return a valid body with some fields replaced or added; occasionally truncated, or with other bytes in it."""
    chat = generator.random() < 0.5
    fields: dict[str, Any] = {"model": "target", "max_tokens": generator.choice((1, 2, 8))}
    fields["messages" if chat else "prompt"] = [{"role": "user", "content": "hello"}] if chat else [5, 6, 7]
    fields["stream"] = generator.random() < 0.5
    for _ in range(generator.randrange(4)):
        fields[generator.choice(FIELDS)] = value(generator)
    if generator.random() < 0.2:
        fields["specdec"] = {generator.choice(sorted(OWN)): value(generator)}
    if generator.random() < 0.1:
        fields |= generator.choice(SHAPES)(generator)
    told = json.dumps(fields).encode()
    spoil = generator.random()
    if spoil < 0.1:
        return told[: generator.randrange(len(told))]
    if spoil < 0.2:
        at = generator.randrange(len(told))
        return told[:at] + generator.randbytes(3) + told[at:]
    if spoil < 0.25:
        return generator.choice(NO_OBJECTS)
    return told


def request(generator: random.Random) -> bytes:
    """Return a request with valid HTTP, except for the values of its headers."""
    path, content = generator.choice(ROUTES), body(generator)
    method = "POST" if generator.random() < 0.95 else generator.choice(METHODS)
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close"]
    if generator.random() < 0.1:
        lines.append(f"authorization: {generator.choice(('Bearer', 'Bearer x' * 100, 'Basic eA=='))}")
    if generator.random() < 0.1:
        lines.append(f"x-request-id: {generator.choice(('a', 'b' * 100, '%00'))}")
    if generator.random() < 0.1:
        lines.append(f"traceparent: {generator.choice(('00-x-y-z', '0' * 500))}")
    if generator.random() < 0.1:
        pieces = [content[at : at + 1000] for at in range(0, len(content), 1000)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        return "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode() + chunks
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


def misrouted(generator: random.Random) -> bytes:
    """Any method at any path."""
    line = f"{generator.choice(METHODS)} {generator.choice(PATHS)} HTTP/1.1"
    return f"{line}\r\nhost: x\r\nconnection: close\r\n\r\n".encode()


def unsound(generator: random.Random) -> bytes:
    """Invalid HTTP/1.1."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return generator.choice(
        (
            generator.randbytes(generator.randrange(1, 2000)),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + generator.randbytes(200),
            b"GET /\r\n\r\n",
            b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: " + b"x" * 100_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
            b"GET / HTTP/1.1\r\na:" + b" " * 30_000 + b"\x00\r\n\r\n",
            b"GET / HTTP/1.1\r\na: b\r\n" + b" c\r\n" * 5_000 + b"\r\n",
            post + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n",
            post + b"transfer-encoding: chunked\r\n\r\n0\r\na:" + b" " * 30_000 + b"\x00\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            post + b"content-length: -1\r\n\r\n{}",
            post + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
            post + b"content-length: 99999999999999999999\r\n\r\n{}",
            post + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
            post + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n",
            post + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            post + b"content-length: 2\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n{}",
            post + b"a\x00b: c\r\n\r\n",
            post + b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
        )
    )


KINDS: tuple[tuple[Callable[[random.Random], bytes], int], ...] = ((request, 80), (misrouted, 8), (unsound, 12))
"""Makers of attacks, and their frequencies in percent."""


def attack(seed: int, number: int) -> tuple[str, random.Random, bytes]:
    """Return the attack with this number: kind, generator for its other choices, and bytes."""
    generator = random.Random(f"{seed}:{number}")
    (make,) = generator.choices([make for make, _ in KINDS], [weight for _, weight in KINDS])
    return make.__name__, generator, make(generator)
