"""The pods of one role, and the choice of the next one to ask."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import grpc
import structlog

from orchestrator.pods.admission import Admission, PodLoad
from specdec.serving.pods.breaker import Breaker
from specdec.serving.pods.connections import connect
from specdec.serving.pods.replicas import Replicas

log = structlog.get_logger()

MAX_DEATHS = 64
"""Number of remembered pod deaths."""

SAME_DEATH_SECONDS = 5.0
"""Sessions of a pod lost within this many seconds count as one death."""

UNFIT_SECONDS = 10.0
"""Seconds until an unfit pod is asked again. By then another pod may have its address, and a try costs little: one text
opens a session."""


class Pod:
    """One replica: its channel, its last reports and its failures."""

    def __init__(self, address: str, channel: grpc.aio.Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.channel = channel
        self.breaker = Breaker(address, clock)
        self.load = PodLoad(clock)
        self.admission = Admission(self.load, self.breaker)
        self.numerics = ""  # fingerprint, as last reported
        self.context_tokens = 0  # longest text it accepts, as last reported; 0: unknown
        self.turn = 0  # number of the `choose` call that last chose it
        self.candidates_at = -math.inf  # when this draft last sent candidates to any text; monotonic
        self._clock = clock
        self.unfit_reason = ""  # why it was last found unfit; machine-readable
        self._unfit: Exception | None = None
        self._unfit_until = 0.0

    def __str__(self) -> str:
        return self.address

    @property
    def in_use(self) -> bool:
        return bool(self.load.ours or self.load.coming)

    @property
    def unfit(self) -> Exception | None:
        """Why the pod can serve no request here; None if it can."""
        return self._unfit if self._clock() < self._unfit_until else None

    def found_unfit(self, reason: str, why: Exception) -> None:
        """Mark the pod as unfit for `UNFIT_SECONDS`."""
        if self.unfit is None:
            log.warning("pod_unfit", pod=str(self), reason=reason, why=str(why))
        self.unfit_reason = reason
        # Drop the traceback: its frames keep their locals alive.
        self._unfit, self._unfit_until = why.with_traceback(None), self._clock() + UNFIT_SECONDS


class PodDeath(NamedTuple):
    """The death of a pod: it vanished without closing its streams, as seen by a session here."""

    at: float
    """Monotonic time."""
    address: str


class Pods(Replicas[Pod]):
    """The replicas of a role. Their addresses may change while sessions run."""

    def __init__(
        self,
        addresses: Iterable[str] = (),
        *,
        connect: Callable[[str], grpc.aio.Channel] = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lambda address: Pod(address, connect(address), clock), addresses)
        self._turns = itertools.count(1)
        self.deaths: deque[PodDeath] = deque(maxlen=MAX_DEATHS)
        """The last deaths of pods, including former replicas."""

    def died(self, pod: Pod) -> None:
        """Note the death of a pod: a session was lost without a status from it."""
        now = time.monotonic()
        if not any(address == pod.address and now - at < SAME_DEATH_SECONDS for at, address in self.deaths):
            self.deaths.append(PodDeath(now, pod.address))

    def choose(
        self,
        *,
        exclude: Collection[Pod] = (),
        avoid: Collection[Pod] = (),
        numerics: str = "",
        tokens: int = 0,
        no_trial: bool = False,
        cached: Mapping[Pod, int] = MappingProxyType({}),
    ) -> Pod | None:
        """Choose a pod that is fit, not in `exclude`, and without an open circuit breaker; None if there is none. Order
        of preference: not in `avoid`; with `no_trial`, a closed breaker; the given `numerics`; memory for a text of
        `tokens` tokens; the most `cached` tokens; the fewest sessions; the longest time since it was chosen."""

        def cost(pod: Pod) -> tuple[bool, bool, bool, bool, int, int, int]:
            small = 0 < pod.context_tokens < tokens
            trial = no_trial and pod.breaker.state != "closed"
            foreign = bool(numerics and pod.numerics and pod.numerics != numerics)
            return (pod in avoid, trial, foreign, small, -cached.get(pod, 0), pod.load.sessions, pod.turn)

        chosen = min((pod for pod in self.willing if pod not in exclude), key=cost, default=None)
        if chosen is not None:
            chosen.turn = next(self._turns)
        return chosen

    @property
    def willing(self) -> list[Pod]:
        """Pods that may be asked: fit, and without an open breaker."""
        return [pod for pod in self if pod.unfit is None and pod.breaker.state != "open"]
