"""Discovery: finds the pods of a role, at given addresses and by DNS names (`dns:`) with one record per pod.

A headless Service of Kubernetes has such a name. Pods come and go, so names are resolved periodically.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from specdec.serving.futures import for_other_thread
from specdec.serving.periodic import Periodic
from specdec.serving.pods.replicas import Replicas
from specdec.wire.address import Address

log = structlog.get_logger()

AGAIN_SECONDS = 3.0
"""Seconds between two resolutions of a name. It need not be short: a new pod takes longer to load its model, and the
breaker notices a dead one."""


ANSWER_SECONDS = 2.0
"""Seconds that a round waits for name servers."""

FORGET_SECONDS = 60.0
"""Seconds for which a name that has lost its records keeps its pods. Afterwards their addresses may be other pods'."""

NO_RECORDS = (socket.EAI_NONAME, socket.EAI_NODATA)


class Resolve(Protocol):
    """A DNS resolver, such as `getaddrinfo` of asyncio's event loops."""

    async def __call__(self, host: str, port: int, *, type: int) -> Sequence[tuple[Any, ...]]: ...


async def resolved(host: str, port: int, *, type: int) -> Sequence[tuple[Any, ...]]:
    """Resolve like the event loop's `getaddrinfo`, in a thread of its own. A silent name server may take a thread for a
    minute; in the loop's thread pool that would delay everything else, and the end of the process."""
    answer, look_up = for_other_thread(partial(socket.getaddrinfo, host, port, type=type))
    threading.Thread(target=look_up, name="name-lookup", daemon=True).start()
    return await answer


class Discovery:
    """Keeps the pods of a role in sync with its addresses."""

    def __init__(
        self,
        addresses: Sequence[Address],
        pods: Replicas[Any],
        *,
        resolve: Resolve | None = None,
        again_seconds: float = AGAIN_SECONDS,
        names: dict[str, str] | None = None,
    ) -> None:
        """`names` gets the DNS name of each target that was resolved from one."""
        self._names = {} if names is None else names
        self._addresses = addresses
        self._pods = pods
        self._resolve = resolve or resolved
        self._known: dict[Address, Sequence[str]] = {}
        self._lost: dict[Address, float] = {}  # time since which a name has no records
        self._lookups: dict[Address, asyncio.Task[Sequence[str]]] = {}  # without an answer yet
        self._former: list[str] = []  # pods of replaced addresses, until all names have been resolved once
        self._watching = Periodic(self._look_again, again_seconds, "discovery_failed")
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """Resolve the names that answer soon; then keep resolving in the background."""
        await self._look_up()
        self._watching.start()

    async def look(self, addresses: Sequence[Address]) -> None:
        """Switch to these addresses. Until every name among them has been resolved once, the pods of the addresses
        that they replace stay."""
        self._former, self._addresses = [pod.address for pod in self._pods], addresses
        self._drop_former()
        if self._watching.is_started:
            await self._look_up()
        else:
            await self.start()

    async def close(self) -> None:
        await self._watching.close()
        for lookup in self._lookups.values():
            lookup.cancel()

    async def _look_again(self) -> None:
        """Resolve the names again, and close the channels of removed pods that are no longer in use."""
        await self._look_up()
        await self._pods.close_idle()

    async def _look_up(self) -> None:
        """Resolve all names together and update the pods. A name that cannot be resolved now keeps its pods, for
        FORGET_SECONDS if it has no records: circuit breakers know which are alive. A lookup without an answer within
        ANSWER_SECONDS counts in a later round, so that a silent name server delays no other name."""
        async with self._looking:
            before, self._lookups = self._lookups, {}
            for address in self._addresses:
                lookup = before.pop(address, None)
                self._lookups[address] = lookup or asyncio.create_task(self._servers(address))
            for lookup in before.values():
                lookup.cancel()
            if self._lookups:
                await asyncio.wait(self._lookups.values(), timeout=ANSWER_SECONDS)
            for address, lookup in list(self._lookups.items()):
                if not lookup.done():
                    log.warning("unresolved", address=address.target, why="the name server has not answered yet")
                    continue
                del self._lookups[address]
                try:
                    self._known[address] = lookup.result()
                    self._lost.pop(address, None)
                except OSError as error:
                    log.warning("unresolved", address=address.target, why=str(error))
                    if error.errno in NO_RECORDS and address in self._known:
                        now = time.monotonic()
                        if now - self._lost.setdefault(address, now) >= FORGET_SECONDS:
                            self._known[address] = ()
            self._drop_former()
            self._pods.become([*self._listed(), *self._former])

    def _listed(self) -> list[str]:
        """Return the pods of the current addresses, as far as these are resolved."""
        return [server for address in self._addresses for server in self._known.get(address, ())]

    def _drop_former(self) -> None:
        """Forget the pods of addresses that are no longer current. Drop former pods that current addresses list too;
        drop all once every name is resolved."""
        self._known = {address: self._known[address] for address in self._addresses if address in self._known}
        self._lost = {address: self._lost[address] for address in self._addresses if address in self._lost}
        listed = set(self._listed())
        unresolved = any(address not in self._known for address in self._addresses)
        self._former = [pod for pod in self._former if unresolved and pod not in listed]

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
