"""Discovery: finds the pods of a role, at addresses that are given and at names whose every record is a pod.

A headless service's name has a record for each of its pods, and pods come and go: names are resolved again and again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from orchestrator.pods import Pods

log = structlog.get_logger()

AGAIN_SECONDS = 3.0
"""Seconds between two resolutions of a name: a new pod takes longer to load its model, and one that is gone is noticed
by its breaker."""


@dataclass(frozen=True)
class Place:
    """A place of pods: `HOST:PORT` is one pod, `dns:NAME:PORT` as many as the name has A and AAAA records."""

    host: str
    port: int
    every_record: bool = False

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse a place; ValueError says what is wrong with it."""
        every_record = text.startswith("dns:")
        host, _, port = text.removeprefix("dns:").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is neither HOST:PORT nor dns:NAME:PORT")
        return cls(host, int(port), every_record)


class Resolve(Protocol):
    """A resolver of names, such as `getaddrinfo` of asyncio's event loops."""

    async def __call__(self, host: str, port: int, *, type: int) -> Sequence[tuple[Any, ...]]: ...


class Discovery:
    """Keeps the pods of a role up to date with its places."""

    def __init__(
        self,
        places: Sequence[Place],
        pods: Pods,
        *,
        resolve: Resolve | None = None,
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        self._places = places
        self._pods = pods
        self._resolve = resolve or asyncio.get_running_loop().getaddrinfo
        self._again_seconds = again_seconds
        self._known: dict[Place, list[str]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolve each name once, or fail to; then go on resolving in the background."""
        await self._look_up()
        if any(place.every_record for place in self._places):
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._again_seconds)
            await self._look_up()
            await self._pods.close_idle()

    async def _look_up(self) -> None:
        """Resolve all names, and update the pods. A name that cannot be resolved now keeps the pods it had: circuit
        breakers know which of them are alive."""
        for place in self._places:
            try:
                self._known[place] = await self._addresses(place)
            except OSError as error:
                log.warning("unresolved", name=place.host, why=str(error))
        self._pods.become(address for place in self._places for address in self._known.get(place, ()))

    async def _addresses(self, place: Place) -> list[str]:
        """Return the addresses of a place's pods; OSError if its name cannot be resolved."""
        if not place.every_record:
            return [f"{place.host}:{place.port}"]
        found = await self._resolve(place.host, place.port, type=socket.SOCK_STREAM)
        return sorted({_target(family, address[0], place.port) for family, _, _, _, address in found})


def _target(family: int, address: str, port: int) -> str:
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
