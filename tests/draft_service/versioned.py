"""Draft services with versions of their model: loops turned by hand, over engines that always guess one token."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from draft_service.candidate_queue import Extension
from draft_service.draft_loop import DraftLoop
from draft_service.forgotten import Forgotten
from draft_service.language_model import LanguageModelDrafter
from draft_service.pass_times import PassTimes
from draft_service.session import DrafterSession
from draft_service.version import State, Version
from draft_service.version_loading import CheckedPass, LoadedVersion
from draft_service.version_trial import TrialLimits
from draft_service.versions import VersionedDrafter
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import draft_pass_of
from tests.draft_service.fakes import ROWS, Engine, running, session

GOOD, BAD = 7, 5
"""The token that every text commits, and another one."""

LIMITS = TrialLimits(share=0.5, tokens=4000)


class Guessing(Engine):
    """Guesses the same next token everywhere. After `lasts` passes, `ends` decides what a pass gives."""

    def __init__(
        self,
        token: int = GOOD,
        *,
        capacity: int = 100_000,
        lasts: int = 1 << 30,
        ends: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
    ) -> None:
        super().__init__(capacity)
        self.token, self.lasts, self.ends = token, lasts, ends

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        logits = super().forward(batch)
        logits[:, [GOOD, self.token]] = logits[:, [self.token, GOOD]]
        self.lasts -= 1
        return logits if self.lasts >= 0 or self.ends is None else self.ends(logits)


POISON = 9


class Half(Guessing):
    """Guesses right in every second pass."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.token = GOOD if len(self.read) % 2 else BAD
        return super().forward(batch)


class Poisoned(Guessing):
    """Fails in every pass over one token."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        if POISON in batch.tokens:
            raise RuntimeError("broken")
        return super().forward(batch)


def raises(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    raise RuntimeError("broken")


def lacks_memory(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    raise MemoryError


def not_a_number(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.full_like(logits, np.nan)


def loaded(engine: Engine, times: PassTimes | None = None) -> LoadedVersion:
    watched = CheckedPass(draft_pass_of(engine))
    drafter = LanguageModelDrafter(engine, rows=ROWS, forward=watched)
    return LoadedVersion(drafter, "0" * 64, times, ROWS, watched)


class Service:
    """A hand-turned draft loop with versions."""

    def __init__(
        self,
        serving: Engine,
        limits: TrialLimits = LIMITS,
        times: PassTimes | None = None,
        forgotten: Forgotten | None = None,
    ) -> None:
        self.failed: list[Exception] = []
        self.sent: dict[DrafterSession, list[Extension]] = {}
        self._draw = 0.0
        self.drafter = VersionedDrafter("first", loaded(serving, times), limits, forgotten, lambda: self._draw)
        self.loop = DraftLoop(self.drafter)

    def begin(self, name: str, engine: Engine) -> Version:
        """Begin the trial of a version."""
        self.drafter.note(name, State.WAITING)
        self.drafter.begin(name, loaded(engine))
        return self.version(name)

    def version(self, name: str) -> Version:
        (found,) = [version for version in self.drafter.known if version.name == name]
        return found

    def open(self, *, is_new: bool = False, what: DrafterSession | None = None) -> DrafterSession:
        """Open a session, of the canary or not."""
        opened = what or session(max_nodes=24)
        self._draw = 0.0 if is_new else 0.999
        sent = self.sent[opened] = []
        self.loop.attach(running(opened, sent.append, self.failed.append))
        return opened

    def write(self, session: DrafterSession, tokens: int = 1) -> None:
        """Let the text of a session grow, with a few steps after each token."""
        for _ in range(tokens):
            for _ in range(3):
                self.loop.turn()
            self.loop.commit(session, session.tree.base, [GOOD], time.monotonic())

    def try_on(self, texts: int = 80) -> None:
        """Generate texts of twenty tokens with both versions in turn, until the trial ends."""
        for number in range(texts):
            if self.drafter.is_free:
                return
            opened = self.open(is_new=number % 2 == 0)
            self.write(opened, 20)
            self.loop.detach(opened)
        raise AssertionError("the trial does not end")

    def proposes(self, session: DrafterSession) -> set[int]:
        """Return the likeliest next token, if any, that a session gets once its text has left its tree."""
        self.loop.commit(session, session.tree.base, [1], time.monotonic())
        for _ in range(6):
            self.loop.turn()
        return set(list(session.tree.root.children)[:1])
