"""The page at `/`: static files, read once at start and served to everyone from memory.

The page holds no secrets: it gets its data from the API, with the user's key.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.openai_api.routes import HOME

FOLDER = Path(__file__).parent / "page"

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types of the files, by suffix."""

HEADERS = {
    "cache-control": "no-cache",  # cached, but revalidated by ETag: a new version shows immediately
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Read the files and return their routes: `/` is index.html, `/page/NAME` any other file."""
    return [_route(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES]


def _route(path: Path) -> Route:
    body = path.read_bytes()
    headers = HEADERS | {"etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}
    url = HOME if path.name == "index.html" else f"/page/{path.name}"
    return Route(url, partial(_answer, body=body, headers=headers, media_type=TYPES[path.suffix]))


async def _answer(request: Request, *, body: bytes, headers: dict[str, str], media_type: str) -> Response:
    known = request.headers.get("if-none-match", "")
    if headers["etag"] in known.split(", ") or known == "*":
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)
