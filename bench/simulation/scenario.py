"""The scenario of a simulation, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.simulation.devices import Hardware
from bench.simulation.language import Language
from verifier_service.servicer import VerifierLimits


@dataclass(frozen=True)
class Scenario:
    """A scenario to simulate.

    `delay`: seconds from any service to another, one way. `warm_up` and `measured`: durations, in plain-decoding steps
    over all sessions. `nodes`: limit on a draft's live candidates or, if `synchronous`, size of its answer
    (`bench.systems.synchronous`). `branches`: children of one node; 0: the services' default. `lockstep`: a synchronous
    step waits for the answers of all drafts.
    """

    hardware: Hardware
    language: Language = field(default_factory=Language)
    sessions: int = 1
    drafts: int = 1  # pods; 0: plain decoding
    shared: bool = False  # the drafts run on the target's device
    delay: float = 0.0
    synchronous: bool = False
    lockstep: bool = False
    nodes: int = VerifierLimits.max_nodes
    branches: int = 0
    always: bool = False  # the speculation controller is off
    warm_up: int = 30
    measured: int = 60

    @property
    def step(self) -> float:
        """Seconds of a plain-decoding step."""
        return self.hardware.target.seconds(self.sessions)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the measured time, from the end of one step to the end of another."""

    seconds: float
    tokens: int
    steps: int
    session_steps: int  # a step with n sessions in it counts n times
    candidates: int  # verified
    busy: float  # fraction of the time in which the target was in a step
    draft_steps: int  # of all pods
    to_orchestrator: tuple[int, int]  # bytes from (drafts, verifier)
    from_orchestrator: tuple[int, int]  # bytes to (drafts, verifier)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def tokens_a_step(self) -> float:
        """Tokens per step of one session."""
        return self.tokens / max(1, self.session_steps)

    @property
    def candidates_a_step(self) -> float:
        """Candidates per step of one session."""
        return self.candidates / max(1, self.session_steps)

    @property
    def bytes_a_token(self) -> float:
        """Bytes of application payload per token, over all hops, both ways."""
        return sum(self.to_orchestrator + self.from_orchestrator) / max(1, self.tokens)
