"""A draft model with adjustable confidence, and its sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draft_service.candidate_queue import Extension
from draft_service.draft_loop import DraftLoop, ServedSession
from draft_service.language_model import LanguageModelDrafter
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from specdec.decoding.calibration import Calibration
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.kv.slots import Slots
from testing.mailbox import Handed

VOCABULARY = 16
ROWS = 16


class Engine:
    """Assigns the same next token everywhere, with logit `sureness`."""

    numerics, exact, vocabulary = "fake", False, VOCABULARY

    def __init__(self, capacity: int = 100_000, sureness: float = 5.0) -> None:
        self.capacity = capacity
        self.sureness = sureness
        self.read: list[list[int]] = []  # tokens of each step

    def packer(self) -> RaggedPacker:
        return RaggedPacker()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.read.append(batch.tokens.tolist())
        logits = np.linspace(0.0, -8.0, VOCABULARY, dtype=np.float32)
        logits[7] = self.sureness
        return np.tile(logits, (len(batch.wanted), 1))

    def copy(self, source: Slots, target: Slots) -> None:
        """Accepts only copies that overwrite the memory of a failed step."""
        assert not source.any()


def session(
    tokens: int = 200, prompt: Sequence[int] = (1, 2, 3), tenant: str = "", weight: float = 1.0, **policy: Any
) -> DrafterSession:
    sampler = RequestSampler(Sampling())
    request = DrafterSessionRequest(
        list(prompt), [], sampler, frozenset(), tokens, 10_000, tenant=tenant, weight=weight
    )
    return DrafterSession(request, ExpansionPolicy(**policy), VOCABULARY, Calibration())


def running(
    session: DrafterSession,
    take: Callable[[Extension], None],
    fail: Callable[[Exception], None],
    takes_more: Callable[[], bool] = lambda: True,
) -> ServedSession:
    """Return a session whose extensions and errors go to these functions."""
    return ServedSession(session, Handed(take, fail, takes_more), lambda extension: extension)


class Listener:
    """A session at a loop, with everything sent to it."""

    def __init__(self, loop: DraftLoop, session: DrafterSession) -> None:
        self.sent: list[Extension] = []
        self.failed: list[Exception] = []
        loop.attach(running(session, self.sent.append, self.failed.append))


class Pod:
    """A hand-turned draft loop over an engine, with everything it sent."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.drafter = LanguageModelDrafter(engine, rows=ROWS)
        self.loop = DraftLoop(self.drafter)
        self.sent: dict[int, list[Extension]] = {}
        self.failed: list[Exception] = []

    def attach(self, session: DrafterSession) -> None:
        sent = self.sent[id(session)] = []
        self.loop.attach(running(session, sent.append, self.failed.append))

    def commit(self, session: DrafterSession, tokens: list[int]) -> None:
        """Commit the next tokens of a session's text."""
        self.loop.commit(session, session.tree.base, tokens, time.monotonic())

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.turn()
