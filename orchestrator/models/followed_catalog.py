"""A catalog that follows the file of models: changes take effect within seconds, without a restart.

A rollout is a series of changes to the file: add a revision with a small share, raise its share, and set that of the
previous revision to 0. A rollback restores the previous shares.
"""

from __future__ import annotations

import asyncio

import structlog

from orchestrator.models.catalog import Catalog
from orchestrator.models.file import LoadedRevision, ModelsFile
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import PeerSettings
from specdec.serving.periodic import Periodic
from specdec.serving.watched import Watched

log = structlog.get_logger()

RELOAD_SECONDS = 1.0
"""Interval in seconds between checks of the file."""


class FollowedCatalog(Catalog):
    """The revisions named in the file."""

    def __init__(self, file: ModelsFile, settings: PeerSettings) -> None:
        """Read the file; ModelsFileError if it cannot be used."""
        super().__init__()
        self._file = file
        self._watched: Watched[tuple[LoadedRevision, ...]] = Watched(file)
        self._settings = settings
        self._is_taken = True  # the catalog serves the revisions of the file as last read
        self._following = Periodic(self._follow, RELOAD_SECONDS, "models_not_taken")

    async def start(self) -> None:
        """Start looking for verifiers, and watching the file for changes."""
        await self._take(self._watched.contents)
        self._following.start()

    async def close(self) -> None:
        await self._following.close()
        await super().close()

    async def _follow(self) -> None:
        """Serve the revisions of a changed file. If that fails, the previous ones stay, and the change is retried."""
        if await asyncio.to_thread(self._watched.changed):
            self._is_taken = False
        if not self._is_taken:
            await self._take(self._watched.contents)
            self._is_taken = True

    async def _take(self, loaded: tuple[LoadedRevision, ...]) -> None:
        """Serve these revisions. A known revision with an unchanged model keeps its pods; with another model, it is
        replaced."""
        before = {revision.key: revision for revision in self}
        served: list[tuple[Revision, LoadedRevision]] = []
        new: list[tuple[Revision, LoadedRevision]] = []
        for source in loaded:
            revision = before.get((source.entry.model, source.entry.revision))
            if revision is None or revision.model is not source.model:
                revision = Revision.of(source, self._settings)
                new.append((revision, source))
            served.append((revision, source))
        try:
            async with asyncio.TaskGroup() as beginning:  # waits for all, even if one fails
                for revision, source in new:
                    beginning.create_task(_begin(revision, source))
        except BaseException:
            await asyncio.gather(*(revision.close() for revision, _ in new))
            raise
        # No await between setting shares and revisions: every request sees only old ones or only new ones.
        for revision, source in served:
            revision.share = source.entry.share
        self.missing = [(entry.model, entry.revision) for entry in self._file.missing]
        self.become(revision for revision, _ in served)
        log.info("models_served", shares={revision.asked_as: revision.share for revision, _ in served})
        await asyncio.gather(
            *(revision.look(source.entry) for revision, source in served if (revision, source) not in new)
        )


async def _begin(revision: Revision, loaded: LoadedRevision) -> None:
    await revision.look(loaded.entry)
    await revision.start()
