"""Who may open a session at a verifier that may be full.

In a flood every request would otherwise be carried to the verifier to be refused there, and the refusals would be slow
when they are wanted most. A verifier tells how many sessions more it takes: beyond these, requests are refused without
asking it. While that is not known, one goes ahead and finds out; its answer waits for no step. If there is no answer,
those behind it need not find that out one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.breaker import Breaker
from orchestrator.pod_capacity import PodCapacity
from specdec.serving.errors import OverloadedError
from specdec.v2 import model_pb2

AT_ONCE = 64
"""Sessions being opened, at most."""

MOMENT = 0.05
"""Seconds for which a refusal stands for others."""


class LeftAloneError(Exception):
    """Others have just found that the verifier does not answer."""


class Admission:
    """To one verifier."""

    def __init__(self, load: PodCapacity, breaker: Breaker) -> None:
        self._load = load
        self._breaker = breaker
        self._changed = asyncio.Event()  # an opening is over

    @asynccontextmanager
    async def opening(self, *, again: bool = False) -> AsyncIterator[None]:
        """Around the opening of a session; OverloadedError if there is no room, LeftAloneError if it is no use to wait
        for it. A text that is taken up `again` is not kept waiting: the verifier will take it."""
        load = self._load
        load.coming += 1
        try:
            while not (again or self._go_ahead()):
                await self._changed.wait()
                if self._breaker.state == "open":
                    raise LeftAloneError("left alone after failures")
            load.opening += 1
            try:
                yield
            except OverloadedError as refusal:
                full = model_pb2.PodCapacity(sessions=load.ours, wait_us=int(1e6 * refusal.retry_after))
                load.report(full, MOMENT)
                raise
            finally:
                load.opening -= 1
                self._changed.set()
                self._changed = asyncio.Event()
        finally:
            load.coming -= 1

    @property
    def refusal(self) -> OverloadedError | None:
        """What to tell whoever comes now, if it is no use to ask the verifier."""
        told = self._load.reported
        if told is None or told.room > self._load.opening:
            return None
        return OverloadedError(f"verifier: has {told.sessions} sessions, no room for more", told.wait_us / 1e6)

    def _go_ahead(self) -> bool:
        """Whether to ask the verifier now; OverloadedError if it is no use."""
        refusal = self.refusal
        if refusal is not None:
            raise refusal
        return self._load.opening < (1 if self._load.reported is None else AT_ONCE)
