"""The pods of one role by address, with addresses added and removed over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import grpc
import structlog

log = structlog.get_logger()


class Replica(Protocol):
    """A pod and the channel to it."""

    address: str

    @property
    def channel(self) -> grpc.aio.Channel: ...

    @property
    def in_use(self) -> bool:
        """True while it serves sessions of ours."""


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """Pods made by `make(address)`. A removed pod keeps its channel while it is in use."""

    def __init__(self, make: Callable[[str], R], addresses: Iterable[str] = ()) -> None:
        self._make = make
        self._pods: dict[str, R] = {}
        self._leaving: list[R] = []
        self.become(addresses)

    def __iter__(self) -> Iterator[R]:
        return iter(self._pods.values())

    def __len__(self) -> int:
        return len(self._pods)

    def become(self, addresses: Iterable[str]) -> None:
        """Replace the set of pods by those at these addresses. Remaining pods keep their state."""
        wanted = dict.fromkeys(addresses)
        gone = [address for address in self._pods if address not in wanted]
        new = [address for address in wanted if address not in self._pods]
        self._leaving += [self._pods.pop(address) for address in gone]
        self._pods |= {address: self._make(address) for address in new}
        if gone:
            log.info("pods_gone", addresses=gone)

    async def close_idle(self) -> None:
        """Close the channels of removed pods that are no longer in use; if cancelled, leave the rest to `close`."""
        for pod in [pod for pod in self._leaving if not pod.in_use]:
            await pod.channel.close()
            self._leaving.remove(pod)

    async def close(self) -> None:
        """Close all channels; called after the last session."""
        for pod in (*self, *self._leaving):
            await pod.channel.close()
