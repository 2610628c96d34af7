"""The pods of one role by address, as addresses come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import grpc
import structlog

log = structlog.get_logger()


class Replica(Protocol):
    """A pod and the channel to it."""

    @property
    def channel(self) -> grpc.aio.Channel: ...

    @property
    def in_use(self) -> bool:
        """True while sessions of ours run there."""


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """Pods made by `make(address)`. One whose address is gone keeps its channel as long as it is in use."""

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
        """Have pods at these addresses, and no others. A pod that stays keeps what is known of it."""
        wanted = dict.fromkeys(addresses)
        gone = [address for address in self._pods if address not in wanted]
        new = [address for address in wanted if address not in self._pods]
        self._leaving += [self._pods.pop(address) for address in gone]
        self._pods |= {address: self._make(address) for address in new}
        if gone:
            log.info("pods_gone", addresses=gone)

    async def close_idle(self) -> None:
        """Close the channels of pods that are gone, once nobody uses them."""
        idle = [pod for pod in self._leaving if not pod.in_use]
        self._leaving = [pod for pod in self._leaving if pod.in_use]
        for pod in idle:
            await pod.channel.close()

    async def close(self) -> None:
        """Close all channels; called after the last session."""
        for pod in (*self, *self._leaving):
            await pod.channel.close()
