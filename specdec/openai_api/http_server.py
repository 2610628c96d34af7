"""The HTTP server: uvicorn on a socket, with TLS whose certificate may be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from specdec.client.tls_files import TlsError, TlsFiles
from specdec.openai_api.connections import MAX_HEADER_BYTES, Connection, Connections
from specdec.serving.watched import Watched

MOST_CONNECTIONS = 1024
"""Connections at the same time, by default."""

KEEP_ALIVE_SECONDS = 75
"""Seconds after which a connection is closed on which no further request comes, by default. A load balancer that keeps
it longer sends a request in the moment when it is closed, which fails; most keep it for 60."""

HEADER_SECONDS = 10.0
"""Seconds from a connection, or a request's first byte, until its headers must have come."""

UNREAD_SECONDS = 60.0
"""Seconds for which a caller may read nothing of what is sent, before the system ends the connection."""

RELOAD_SECONDS = 5.0
"""Seconds between two looks at whether the files of the certificate have changed."""


class HttpServer:
    """Serves an ASGI application, from `start` until `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        tls: ServerTls | None = None,
        most_connections: int = MOST_CONNECTIONS,
        keep_alive_seconds: int = KEEP_ALIVE_SECONDS,
        drain_seconds: float = 0.0,
        header_seconds: float = HEADER_SECONDS,
        unread_seconds: float = UNREAD_SECONDS,
    ) -> None:
        """Serve at the listener's address. At `most_connections` idle ones give way to new ones; if none is idle, new
        ones are answered 503 unless they ask for health, and closed."""
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not what callers do wrong
        self.port: int = listener.getsockname()[1]
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))  # connections too
        self._listener = listener
        self._tls = tls
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(header_seconds, Connections(most_connections)),
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # anybody may send them
                timeout_keep_alive=keep_alive_seconds,
                timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type]  # a fraction is one too
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )

    async def start(self) -> None:
        """Listen; OSError if that cannot be."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._reloading = None if self._tls is None else asyncio.create_task(self._tls.keep_up_to_date())
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._serving, up}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self._serving  # raises what was in the way

    async def stop(self) -> None:
        """Take no more connections, give running requests their time, and cancel the rest."""
        self._server.should_exit = True
        if self._reloading is not None:
            self._reloading.cancel()
        await self._serving


def _protocol(header_seconds: float, connections: Connections) -> type[Connection]:
    """Return the class of connections: uvicorn makes them by its class."""

    class Limited(Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, header_seconds=header_seconds, connections=connections, **options)

    return Limited


class _Server(uvicorn.Server):
    """A server that leaves signals to its process, and tells when it is `up`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class ServerTls:
    """The TLS of the server. Certificate and key are read again when their files change. Authorities are read once: a
    context can only learn to trust more of them."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files; TlsError if they cannot be used."""
        if files.certificate is None:
            raise TlsError("{2} is given, {0} and {1} are missing".format(*files.options))
        files.read()  # says in a line what is wrong
        self._own = replace(files, authorities=None)
        self._watched = Watched(self._own)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load()
        if files.authorities is not None:
            self.context.load_verify_locations(files.authorities)
            self.context.verify_mode = ssl.CERT_REQUIRED

    async def keep_up_to_date(self) -> None:
        """Look at the files every RELOAD_SECONDS. What they hold counts for new connections."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            if self._watched.changed():
                with contextlib.suppress(OSError):  # replaced once more by now (ssl.SSLError is one)
                    self._load()

    def _load(self) -> None:
        assert self._own.certificate is not None
        self.context.load_cert_chain(self._own.certificate, self._own.key)
