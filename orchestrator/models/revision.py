"""One revision of a model: what its requests depend on, and the pods that serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import structlog

from orchestrator.models.file import SEPARATOR, LoadedRevision, RevisionEntry
from orchestrator.models.grammar_check import GrammarCheck
from orchestrator.models.stats import OrchestratorStats
from orchestrator.pods.peers import PeerFinder, Peers, PeerSettings
from orchestrator.pods.readiness import Readiness
from orchestrator.requests.model import ServedModel
from specdec.serving.bounded_threads import BoundedThreads

log = structlog.get_logger()

MAX_RESUMING = 1024
"""Limit on texts waiting for resumption: when an orchestrator dies, all of its texts move to the others."""


class Revision:
    """A revision: a model, its pods, and the counts of its requests. Running requests keep it alive."""

    def __init__(
        self,
        model: ServedModel,
        peers: Peers,
        *,
        name: str = "",
        share: float = 1.0,
        grammars: GrammarCheck | None = None,
        finder: PeerFinder | None = None,
    ) -> None:
        """`name` may be empty for the only revision of a model. Without `grammars`, the grammars of requests are not
        tried before pods get them; without a `finder`, `peers` never changes."""
        self.name = name
        self.model = model
        self.peers = peers
        self.share = share
        self.grammars = grammars
        self.stats = OrchestratorStats()
        self.readiness = Readiness(peers, model)
        self.resuming = BoundedThreads("resumed texts", 1, MAX_RESUMING)
        """A thread that detokenises the part of a resumed text that its client already has."""
        self._finder = finder
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def of(cls, loaded: LoadedRevision, settings: PeerSettings) -> Self:
        """Return a revision as in the file; `look` finds its pods."""
        entry, finder = loaded.entry, PeerFinder(settings)
        defaults, grammars = loaded.model.defaults, GrammarCheck(entry.directory)
        log.info("generation_defaults", model=entry.label, used=defaults.used, not_taken=defaults.not_taken)
        return cls(loaded.model, finder.peers, name=entry.revision, share=entry.share, grammars=grammars, finder=finder)

    @property
    def key(self) -> tuple[str, str]:
        """The names of the model and of the revision."""
        return self.model.name, self.name

    @property
    def asked_as(self) -> str:
        """The model name in requests for this revision; empty if it has no name."""
        return f"{self.model.name}{SEPARATOR}{self.name}" if self.name else ""

    @property
    def ready(self) -> bool:
        """True from the first verifier found until none has been reachable for `failover_seconds`."""
        return self.readiness.ready

    @contextmanager
    def request(self, tenant_class: str) -> Iterator[None]:
        self._idle.clear()
        try:
            with self.stats.request(tenant_class):
                yield
        finally:
            if not self.stats.running_requests:
                self._idle.set()

    async def until_idle(self) -> None:
        await self._idle.wait()

    async def look(self, entry: RevisionEntry) -> None:
        """Look for pods at the addresses of the file's current entry."""
        assert self._finder is not None
        await self._finder.look(entry.verifiers, entry.drafts)
        self.peers = self._finder.peers

    async def start(self) -> None:
        """Start looking for verifiers: the revision is not ready until one is found."""
        await self.readiness.start()

    async def close(self) -> None:
        """Free all resources; called after the last session."""
        if self.grammars is not None:
            await self.grammars.close()
        await self.readiness.close()
        self.resuming.close()
        await (self.peers if self._finder is None else self._finder).close()
