"""Where the pods of a role are: addresses that are given, and names whose every record is a pod.

A headless service's name has a record for each of its pods, and they come and go: names are resolved again and again.
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
"""Between two resolutions."""


@dataclass(frozen=True)
class Place:
    """`HOST:PORT`, one pod; or `dns:NAME:PORT`, as many as the name has A and AAAA records."""

    host: str
    port: int
    every_record: bool = False

    @classmethod
    def parse(cls, text: str) -> Place:
        """ValueError says what is wrong."""
        every_record = text.startswith("dns:")
        host, _, port = text.removeprefix("dns:").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is no HOST:PORT, nor dns:NAME:PORT")
        return cls(host, int(port), every_record)


class Resolve(Protocol):
    """As `asyncio`'s event loops do."""

    async def __call__(self, host: str, port: int, *, type: int) -> Sequence[tuple[Any, ...]]: ...


class Discovery:
    """Keeps a role's pods those of its places."""

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
        """Returns when each name was resolved once, or could not be."""
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
        """A name that cannot be resolved now keeps the pods it had: breakers know which of them are alive."""
        for place in self._places:
            try:
                self._known[place] = await self._addresses(place)
            except OSError as error:
                log.warning("unresolved", name=place.host, why=str(error))
        self._pods.become(address for place in self._places for address in self._known.get(place, ()))

    async def _addresses(self, place: Place) -> list[str]:
        """Of its pods; OSError if the name cannot be resolved."""
        if not place.every_record:
            return [f"{place.host}:{place.port}"]
        found = await self._resolve(place.host, place.port, type=socket.SOCK_STREAM)
        return sorted({_target(family, address[0], place.port) for family, _, _, _, address in found})


def _target(family: int, address: str, port: int) -> str:
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
