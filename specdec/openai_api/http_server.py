"""The HTTP server: uvicorn on a socket, with TLS and reloadable certificates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from specdec.openai_api.connections import MAX_HEADER_BYTES, Connections, HttpConnection
from specdec.serving.periodic import Periodic
from specdec.serving.watched import Watched
from specdec.wire.tls_files import TlsError, TlsFiles

MAX_CONNECTIONS = 1024
"""Default limit on concurrent connections."""

KEEP_ALIVE_SECONDS = 75
"""Default seconds after which an idle connection is closed, more than the 60 s of most load balancers. A load balancer
that keeps connections longer might send a request just as the server closes its connection, and lose it."""

HEADER_SECONDS = 10.0
"""Seconds for headers to arrive, counted from the connection or from a request's first byte."""

UNREAD_SECONDS = 60.0
"""Seconds without progress in sending after which the kernel ends the connection (TCP_USER_TIMEOUT)."""

ACCEPTED_AT_ONCE = 4
"""Maximum number of connections accepted before other events get their turn. Each takes a fifth of a millisecond, or a
millisecond with a request that is refused."""

BACKLOG = 2048
"""Number of connections for which the kernel completes the handshake before the server accepts them."""

RELOAD_SECONDS = 5.0
"""Seconds between checks of the certificate files for changes."""


class HttpServer:
    """Serves an ASGI application, from `start` until `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        tls: ServerTls | None = None,
        most_connections: int = MAX_CONNECTIONS,
        refused: Callable[[int], None] = lambda _: None,
        keep_alive_seconds: int = KEEP_ALIVE_SECONDS,
        drain_seconds: float = 0.0,
        header_seconds: float = HEADER_SECONDS,
        unread_seconds: float = UNREAD_SECONDS,
    ) -> None:
        """Serve at the listener's address. At `most_connections`, idle connections are evicted for new ones. Without an
        idle one, a new connection is answered with 503 and closed; a health check is still answered. `refused` is
        called with the status of each answer that does not come from the application."""
        logger = logging.getLogger("uvicorn.error")
        logger.setLevel(logging.ERROR)  # no warnings about callers' mistakes
        logger.addFilter(_is_no_cut_off)
        self.port: int = listener.getsockname()[1]
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))  # inherited
        self._listener = listener
        self._tls = tls
        self._reloading: Periodic | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(header_seconds, Connections(most_connections, refused)),
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # anyone can forge them
                timeout_keep_alive=keep_alive_seconds,
                timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type]  # fractions work
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )

    async def start(self) -> None:
        """Start listening; OSError if that fails."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        if self._tls is not None:
            self._reloading = Periodic(self._tls.reload, RELOAD_SECONDS, "certificates_not_taken")
            self._reloading.start()
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._serving, up}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self._serving  # raises the cause

    async def stop(self) -> None:
        """Stop accepting connections, let running requests finish until the deadline, and cancel the rest."""
        self._server.should_exit = True
        if self._reloading is not None:
            await self._reloading.close()
        await self._serving


def _protocol(header_seconds: float, connections: Connections) -> type[HttpConnection]:
    """Return a connection class with these arguments bound: uvicorn instantiates it."""

    class Limited(HttpConnection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, header_seconds=header_seconds, connections=connections, **options)

    return Limited


def _is_no_cut_off(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's error about requests that outlast a drain: the event `cut_off` reports each one."""
    return "graceful shutdown exceeded" not in record.getMessage()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its process and sets `up` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio would use `backlog` for accepts per event as well
        self.up.set()


class ServerTls:
    """The TLS of the server. Certificate and key are reloaded when their files change. Authorities are read once, since
    an SSL context can add authorities but not remove them."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files; TlsError if they are unusable."""
        if files.certificate is None:
            raise TlsError("{2} is given, {0} and {1} are missing".format(*files.options))
        files.read()  # raises one-line errors
        self._own = replace(files, authorities=None)
        self._watched = Watched(self._own)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load()
        if files.authorities is not None:
            self.context.load_verify_locations(files.authorities)
            self.context.verify_mode = ssl.CERT_REQUIRED

    async def reload(self) -> None:
        """Load the files again for new connections, if they have changed."""
        if self._watched.changed():
            with contextlib.suppress(OSError):  # replaced again meanwhile
                self._load()

    def _load(self) -> None:
        assert self._own.certificate is not None
        self.context.load_cert_chain(self._own.certificate, self._own.key)
