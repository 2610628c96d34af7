"""One revision of a model, as an orchestrator serves it: what its requests depend on, and who serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import structlog

from orchestrator.grammar_check import GrammarCheck
from orchestrator.model import Model
from orchestrator.models_file import SEPARATOR, LoadedRevision, RevisionEntry
from orchestrator.peer_finder import PeerFinder, PeerSettings
from orchestrator.peers import Peers
from orchestrator.readiness import Readiness
from orchestrator.stats import OrchestratorStats
from specdec.serving.bounded_threads import BoundedThreads

log = structlog.get_logger()

MAX_RESUMING = 1024
"""Texts that may wait to be resumed: an orchestrator's death brings all of its texts to the others."""


class Revision:
    """A revision: a model, its pods, and the counts of its requests. These keep it until the last of them has ended."""

    def __init__(
        self,
        model: Model,
        peers: Peers,
        *,
        name: str = "",
        share: float = 1.0,
        grammars: GrammarCheck | None = None,
        finder: PeerFinder | None = None,
    ) -> None:
        """The only revision of a model may do without a `name`. Without `grammars`, those of requests go to the pods
        untried; without a `finder`, the pods stay those of `peers`."""
        self.name = name
        self.model = model
        self.peers = peers
        self.share = share
        self.grammars = grammars
        self.stats = OrchestratorStats()
        self.readiness = Readiness(peers, model)
        self.resuming = BoundedThreads("resumed texts", 1, MAX_RESUMING)
        """Threads that detokenise again what clients have already of texts that they resume."""
        self._finder = finder
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def of(cls, loaded: LoadedRevision, settings: PeerSettings) -> Self:
        """Return a revision as the file has it; its pods are found by `look`."""
        entry, finder = loaded.entry, PeerFinder(settings)
        defaults, grammars = loaded.model.defaults, GrammarCheck(entry.directory)
        log.info("generation_defaults", model=entry.label, used=defaults.told, not_taken=defaults.not_taken)
        return cls(loaded.model, finder.peers, name=entry.revision, share=entry.share, grammars=grammars, finder=finder)

    @property
    def key(self) -> tuple[str, str]:
        """The names of the model and of the revision."""
        return self.model.name, self.name

    @property
    def asked_as(self) -> str:
        """How a request asks for just this revision; empty if it has no name."""
        return f"{self.model.name}{SEPARATOR}{self.name}" if self.name else ""

    def serves(self, fingerprint: str) -> bool:
        """Return whether its verifiers have been seen to have a model with this fingerprint."""
        return self.readiness.knows(fingerprint)

    @property
    def ready(self) -> bool:
        """True from the first verifier that is found on, unless none was reachable for `failover_seconds`."""
        return self.readiness.ready

    @contextmanager
    def request(self, tenant_class: str) -> Iterator[None]:
        """Count a request of a tenant of this class, and how it ends."""
        self._idle.clear()
        try:
            with self.stats.request(tenant_class):
                yield
        finally:
            if not self.stats.running_requests:
                self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    async def look(self, entry: RevisionEntry) -> None:
        """Look for its pods at the addresses that the file says now."""
        assert self._finder is not None
        await self._finder.look(entry.verifiers, entry.drafts)
        self.peers = self._finder.peers

    async def start(self) -> None:
        """Begin to look for verifiers: until one is found, the revision is not ready."""
        await self.readiness.start()

    async def close(self) -> None:
        """Free what it holds; called after the last session."""
        if self.grammars is not None:
            await self.grammars.close()
        await self.readiness.close()
        self.resuming.close()
        await (self.peers if self._finder is None else self._finder).close()
