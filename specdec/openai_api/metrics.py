"""The metrics of the HTTP server: requests by route and status, and their latency without probes and scrapes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.openai_api.event_stream import FAILED, PING
from specdec.openai_api.routes import METRICS, PROBES
from specdec.serving.histogram import Histogram
from specdec.serving.metrics.families import Families

UNTIMED = frozenset({*PROBES, METRICS})
"""Routes whose latency is not measured: they are requested every few seconds and answered immediately."""

OTHER = "other"
"""The route label of paths with variables, of the page's files, of unknown paths, and of refused connections."""


class Counted:
    """An ASGI middleware that counts requests."""

    def __init__(self, app: ASGIApp, routes: Iterable[str]) -> None:
        self._app = app
        self._routes = frozenset(routes)
        self.running = 0
        """Requests in flight."""
        self._ended: Counter[tuple[str, str]] = Counter()  # by route and status
        self._seconds = Histogram()
        self._first_byte = Histogram()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.monotonic(), 499  # 499: disconnected before an answer (nginx)
        sent = untimed = scope["path"] in UNTIMED

        async def noting(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not sent and PING not in message:
                sent = True
                self._first_byte.observe(time.monotonic() - begin)
            await send(message)

        self.running += 1
        try:
            await self._app(scope, receive, noting)
        finally:
            self.running -= 1
            status = scope.get(FAILED, status)
            route = scope["path"] if scope["path"] in self._routes else OTHER
            self._ended[route, str(status)] += 1
            if not untimed:
                self._seconds.observe(time.monotonic() - begin)

    def refused(self, status: int) -> None:
        """Count a request that its connection has answered, without the application."""
        self._ended[OTHER, str(status)] += 1

    def metrics(self) -> list[Metric]:
        families = Families("openai")
        families.files()
        families.gauge("requests_running", "Requests in flight.", self.running)
        families.counters(
            "requests",
            "Requests completed, by route and HTTP status. 499: the caller disconnected before the answer. A stream "
            "that fails midway counts under the status of an immediate failure.",
            ("route", "status"),
            self._ended,
        )
        families.histogram(
            "time_to_first_byte_seconds",
            "Seconds from the request to the first part of the answer, pings aside; without probes and scrapes.",
            self._first_byte,
        )
        families.histogram(
            "request_seconds",
            "Seconds from the request to the end of the answer, without probes and scrapes.",
            self._seconds,
        )
        return families.made
