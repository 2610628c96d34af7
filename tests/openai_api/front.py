"""The HTTP server in this process, on a real socket, in front of an orchestrator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import openai

from specdec.client import AsyncClient
from specdec.openai_api.app import make_app
from specdec.openai_api.bodies import BODY_SECONDS
from specdec.openai_api.gateway import Gateway
from specdec.openai_api.http_server import HttpServer
from specdec.openai_api.metrics import Counted
from specdec.openai_api.response_store import ResponseStore
from specdec.openai_api.routes import ROUTES
from specdec.serving.process.listening import bound


@dataclass(frozen=True)
class Front:
    """A running HTTP server, and an official client connected to it."""

    address: str
    client: openai.AsyncOpenAI
    app: Counted
    server: HttpServer


@asynccontextmanager
async def front(
    *orchestrators: str,
    serves: bool = True,
    most_connections: int = 100,
    body_seconds: float = BODY_SECONDS,
    origins: Sequence[str] = (),
    with_page: bool = False,
    store: ResponseStore | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> AsyncIterator[Front]:
    """Yield the server, with a client that does not retry."""

    async def health() -> bool:
        return serves

    async with AsyncClient(orchestrators, max_retries=1) as client:
        gateway = Gateway(*3 * [lambda: nullcontext(client)])
        made = make_app(
            gateway,
            health,
            most_requests=most_connections,
            body_seconds=body_seconds,
            origins=origins,
            store=store,
            with_page=with_page,
            with_stats=with_page,
            metrics=metrics,
        )
        app = Counted(made, ROUTES)
        server = HttpServer(app, bound("127.0.0.1", 0), most_connections=most_connections, refused=app.refused)
        await server.start()
        address = f"127.0.0.1:{server.port}"
        try:
            async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="key", max_retries=0) as official:
                yield Front(address, official, app, server)
        finally:
            await server.stop()
