"""The seam above the step loop: the servicer's interface to the component that runs the target.

Above it are messages, limits and admission (`servicer.py`); below it sessions, memory and steps. `StepLoop` is one
backend; an engine with its own scheduler would be another one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.speculation import Outlook
from specdec.decoding.tree import Paths
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.serving.worker import Worker
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import CommitDetails, FeatureRows, PromptScores, VerifyResult
from verifier_service.backend.stats import VerifierStats


class ResponseMaker:
    """Turns a session's results into its responses, on the event loop of the response queue. Unless overridden, the
    results are the responses."""

    def commit(self, result: VerifyResult, details: CommitDetails) -> Any:
        return result, details

    def scores(self, scores: PromptScores) -> Any:
        return scores

    def query(self, query: DraftQuery) -> Any:
        return query

    def features(self, rows: FeatureRows) -> Any:
        return rows


class BackendSession(Protocol):
    """The servicer's view of a session. Methods are called in the worker's thread unless marked thread-safe."""

    refused_extends: int  # invalid messages of candidates

    @property
    def request(self) -> VerifierSessionRequest: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def awaits_draft(self) -> bool:
        """True if the session has memory, but cannot choose a token until its draft sends a distribution.
        Thread-safe."""

    def extend(self, base: int, paths: Paths, arrived: float, base_age: float) -> None:
        """Take candidates that start at `base`; ValueError if they are invalid. `arrived`: arrival by `time.monotonic`;
        `base_age`: seconds since their sender learned of this base."""

    def set_policy(self, policy: Policy) -> None:
        """Replace the speculation policy."""

    def client_has_read(self, tokens: int, scored: int) -> None:
        """Record that the client has read `tokens` generated tokens, and the log-probabilities of the prompt's first
        `scored` tokens."""


class MemoryUse(NamedTuple):
    """Tokens of KV cache: in total, held by sessions, and in cached prefixes that no session holds."""

    tokens: int
    held: int
    cached: int


class SessionBackend(Worker):
    """Runs the target: a worker thread that owns all sessions."""

    stats: VerifierStats
    chains_only: bool = False
    """True if a step verifies a single chain of candidates per session: no tree and no lookahead window."""
    features_fingerprint: str = ""
    """Fingerprint of the features that the backend can send to drafts; empty: none."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Maximum tokens of memory for one session."""

    @abstractmethod
    def session(self, request: VerifierSessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> Any:
        """Return a new session (`BackendSession`), not served yet. Thread-safe.

        `max_nodes`: limit on live candidates of its draft; `vocabulary`: size of the target's vocabulary.
        """

    @abstractmethod
    def serve(
        self, session: Any, responses: ResponseQueue[Any], response_maker: ResponseMaker, timeline: Timeline
    ) -> None:
        """Allocate memory for a session as soon as possible, and send its commits until it ends or is detached. Before
        the commits, send the log-probabilities of its prompt, if requested. Also send queries to its draft
        (CONTRASTIVE), and features to a draft that reads them. Record in the timeline when the session is admitted or
        preempted, and when its prompt is computed. EngineLostError if the engine is lost. In the worker's thread."""

    @abstractmethod
    def detach(self, session: Any) -> None:
        """Forget a session in any state and free its memory. Idempotent; in the worker's thread."""

    @abstractmethod
    def outlook(self, session: Any, sessions: int) -> Outlook:
        """Return (whether candidates of a remote draft are wanted, the break-even probability) for a new session, the
        latest of `sessions` similar ones. Thread-safe."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return the use of the KV cache. Thread-safe."""

    @abstractmethod
    def known_prefix(self, hashes: Iterable[int]) -> int:
        """Return the number of leading tokens in the prefix cache, for a text with these block hashes
        (`specdec.decoding.block_hashes`). Thread-safe."""

    @abstractmethod
    def fitting(self, tokens: float) -> int:
        """Return how many sessions with texts of `tokens` tokens would get memory immediately. Thread-safe."""
