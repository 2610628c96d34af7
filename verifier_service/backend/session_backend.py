"""The seam above the step loop: what the servicer asks of whoever runs the target.

Above it are messages, limits and admission (`servicer.py`); below it sessions, memory and steps. `StepLoop` is one
backend; another engine with a scheduler of its own is put here, beside it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from specdec.decoding.tree import Paths
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.serving.worker import Worker
from verifier_service.backend.request import Policy, SessionRequest
from verifier_service.backend.result import StepTimes, VerifyResult
from verifier_service.backend.stats import VerifierStats

MakeCommit = Callable[[VerifyResult, StepTimes], Any]
"""Makes a response of a verify result and its times; called on the event loop of the response queue."""


class BackendSession(Protocol):
    """A session, as far as messages are for it. All methods are called in the worker's thread."""

    refused_extends: int  # messages of candidates that were invalid

    @property
    def request(self) -> SessionRequest: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def awaits_draft(self) -> bool:
        """True if the session has memory, and no token can be chosen before its draft has sent something. Any thread
        may ask."""

    def extend(self, base: int, paths: Paths, arrived: float, base_age: float) -> None:
        """Take candidates that start at `base`, which their sender has known for `base_age` seconds; they `arrived` at
        that `time.monotonic`. ValueError if they are invalid."""

    def set_policy(self, policy: Policy) -> None:
        """Speculate by this policy from now on."""

    def client_has_read(self, tokens: int) -> None:
        """Note that the client has taken so many generated tokens."""


class MemoryUse(NamedTuple):
    """Tokens of KV cache: all, those that sessions hold, and those of cached prefixes that nobody holds."""

    tokens: int
    held: int
    cached: int


class SessionBackend(Worker):
    """Runs the target: a worker thread that owns all sessions."""

    stats: VerifierStats
    chains_only: bool = False
    """True if a step verifies one chain of candidates for each session: no tree and no lookahead window."""

    @property
    @abstractmethod
    def context(self) -> int:
        """The number of tokens that one session can have memory for at most."""

    @abstractmethod
    def session(self, request: SessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> Any:
        """Return a new session (`BackendSession`) that is not served yet. Any thread may ask.

        A draft may have `max_nodes` candidates alive in it, of a `vocabulary` of so many tokens."""

    @abstractmethod
    def serve(self, session: Any, responses: ResponseQueue[Any], commit: MakeCommit, timeline: Timeline) -> None:
        """Give a session memory as soon as there is some, and send its commits until it has ended or is detached;
        record when it gets memory, loses it, and has its prompt computed. EngineLostError if nothing can be computed.
        In the worker's thread."""

    @abstractmethod
    def detach(self, session: Any) -> None:
        """Forget a session and free its memory, whatever state it is in. In the worker's thread, once or more."""

    @abstractmethod
    def drafting_outlook(self, session: Any, sessions: int) -> tuple[bool, float]:
        """Return (True if candidates of a remote draft are wanted, the break-even probability) for a new session, the
        last of so many `sessions` like it. Any thread may ask."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return how the KV cache is used. Any thread may ask."""

    @abstractmethod
    def known_prefix(self, hashes: Iterable[int]) -> int:
        """Return how many leading tokens of a text need not be computed, which has these block hashes
        (`specdec.decoding.block_hashes`). Any thread may ask."""

    @abstractmethod
    def fitting(self, tokens: float) -> int:
        """Return how many sessions with texts of so many tokens would get memory at once. Any thread may ask."""
