"""Discovery: finds the pods of a role, at addresses that are given and at names (`dns:`) whose every record is a pod.

A headless service's name has a record for each of its pods, and pods come and go: names are resolved again and again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import structlog

from specdec.client.address import Address

log = structlog.get_logger()

AGAIN_SECONDS = 3.0
"""Seconds between two resolutions of a name: a new pod takes longer to load its model, and one that is gone is noticed
by its breaker."""


class Resolve(Protocol):
    """A resolver of names, such as `getaddrinfo` of asyncio's event loops."""

    async def __call__(self, host: str, port: int, *, type: int) -> Sequence[tuple[Any, ...]]: ...


class FoundPod(Protocol):
    """A pod of a role."""

    address: str


class FoundPods(Protocol):
    """The pods of a role, whose addresses may change while sessions run."""

    def __iter__(self) -> Iterator[FoundPod]: ...

    def become(self, addresses: Iterable[str]) -> None:
        """Have pods at these addresses, and no others."""

    async def close_idle(self) -> None:
        """Close the channels of pods that are gone, once nobody uses them."""


class Discovery:
    """Keeps the pods of a role up to date with its addresses."""

    def __init__(
        self,
        addresses: Sequence[Address],
        pods: FoundPods,
        *,
        resolve: Resolve | None = None,
        again_seconds: float = AGAIN_SECONDS,
        names: dict[str, str] | None = None,
    ) -> None:
        """`names` is kept up to date with the name by which each target was found, for those that have one."""
        self._names = {} if names is None else names
        self._addresses = addresses
        self._pods = pods
        self._resolve = resolve or asyncio.get_running_loop().getaddrinfo
        self._again_seconds = again_seconds
        self._known: dict[Address, Sequence[str]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """Resolve each name once, or fail to; then go on resolving in the background."""
        await self._look_up()
        self._watching = asyncio.create_task(self._watch())

    async def look(self, addresses: Sequence[Address]) -> None:
        """Find pods at these addresses from now on, and at no others."""
        self._addresses = addresses
        if self._watching is None:
            await self.start()
        else:
            await self._look_up()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._again_seconds)
            try:
                await self._look_up()
                await self._pods.close_idle()
            except Exception:  # certificates that are being replaced, say
                log.exception("discovery_failed")

    async def _look_up(self) -> None:
        """Resolve all names, and update the pods. A name that cannot be resolved now keeps the pods it had: circuit
        breakers know which of them are alive. While one has never been resolved, nobody has to leave for it."""
        async with self._looking:
            for address in self._addresses:
                try:
                    self._known[address] = await self._servers(address)
                except OSError as error:
                    log.warning("unresolved", address=address.target, why=str(error))
            found = [server for address in self._addresses for server in self._known.get(address, ())]
            if any(address not in self._known for address in self._addresses):
                found += [pod.address for pod in self._pods]
            self._pods.become(found)

    async def _servers(self, address: Address) -> Sequence[str]:
        """Return the targets of an address's pods; OSError if its name cannot be resolved."""
        if address.name is None:
            return address.servers
        name, port = address.name
        found = await self._resolve(name, port, type=socket.SOCK_STREAM)
        targets = sorted({_target(family, record[0], port) for family, _, _, _, record in found})
        self._names |= dict.fromkeys(targets, name)
        return targets


def _target(family: int, address: str, port: int) -> str:
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
