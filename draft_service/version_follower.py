"""Follows the folder of versions: loads new ones beside the serving one, one at a time, and hands them to the drafter.

It has a thread of its own. The drafter belongs to the draft loop's, so everything reaches it as an action between two
steps.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from draft_service.version_folder import FoundVersion
from draft_service.version_loading import LoadedVersion, VersionRefusedError, remove_export
from draft_service.versions import State, VersionedDrafter
from specdec.engine.memory import give_freed_memory_back
from specdec.serving.watched import Watched
from specdec.wire.file_version import Version as FileVersion

log = structlog.get_logger()

LOOK_SECONDS = 1.0
"""Interval in seconds between looks into the folder."""

CLOSE_SECONDS = 10.0
"""Seconds for a version that is being loaded while the service stops. Then the process ends without it."""


class Loader(Protocol):
    """Loads a version, in a thread that ends afterwards."""

    def load(self, found: FoundVersion, expected: Callable[[int], float] | None) -> LoadedVersion:
        """Return the version in memory; VersionRefusedError if it cannot serve."""


class Actions(Protocol):
    """Runs actions in the thread that a drafter belongs to."""

    def submit(self, action: Callable[[], None]) -> None:
        """Run an action, now or later, after those submitted before."""


class VersionFollower:
    """Keeps a drafter's versions in step with a folder."""

    def __init__(
        self, folder: Watched[tuple[FoundVersion, ...]], loader: Loader, worker: Actions, drafter: VersionedDrafter
    ) -> None:
        """`worker` is the draft loop of `drafter`."""
        self.drafter = drafter
        self._folder = folder
        self._loader = loader
        self._worker = worker
        self._tried: dict[str, FileVersion] = {}  # markers of versions that were loaded or refused
        self._waiting: list[FoundVersion] = []
        self._handed_over: threading.Event | None = None  # set once the drafter has the version loaded last
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="versions", daemon=True)

    def start(self) -> None:
        """Begin to look, at once and then every LOOK_SECONDS."""
        self._take(self._folder.contents)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:  # the service goes on with the versions that it has
                log.exception("versions_not_followed")
            self._stopping.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Do what is due: take a changed folder, free memory, load the next version if its trial may begin."""
        if self._folder.changed():
            self._take(self._folder.contents)
        self._free()
        if self._handed_over is not None and not self._handed_over.is_set():
            return
        if self._waiting and self.drafter.is_free:
            self._load(self._waiting.pop(0))

    def _take(self, found: tuple[FoundVersion, ...]) -> None:
        """Take the folder's contents: new versions, and those whose marker has changed, wait for their trial."""
        present = {version.name for version in found}
        for name in [*(version.name for version in self._waiting), *self._tried]:
            if name not in present:
                self._tried.pop(name, None)
                self._worker.submit(partial(self.drafter.remove, name))
        live = self._live()
        self._waiting = [version for version in found if self._tried.get(version.name) != version.marked]
        for version in [version for version in self._waiting if version.name in live]:
            self._waiting.remove(version)
            log.warning("version_left_out", version=version.name, why="a version of this name is served")
        for version in self._waiting:
            self._worker.submit(partial(self.drafter.note, version.name, State.WAITING))

    def _live(self) -> set[str]:
        """Return the names of versions in memory, with the one that is handed over now."""
        return {version.name for version in self.drafter.known if version.loaded is not None}

    def _load(self, found: FoundVersion) -> None:
        """Load a version, and hand it over or record why it is refused."""
        self._tried[found.name] = found.marked
        self._worker.submit(partial(self.drafter.note, found.name, State.LOADING))
        loaded: list[LoadedVersion] = []
        problems: list[str] = []
        expected = self.drafter.expected

        def load() -> None:
            try:
                loaded.append(self._loader.load(found, expected))
            except VersionRefusedError as error:
                problems.append(str(error))

        begin = time.monotonic()
        thread = threading.Thread(target=load, name="load-version", daemon=True)
        thread.start()
        while thread.is_alive() and not self._stopping.is_set():
            thread.join(LOOK_SECONDS)
        self._handed_over = handed_over = threading.Event()
        if self._stopping.is_set():
            return
        if problems:
            self._worker.submit(partial(self.drafter.note, found.name, State.REFUSED, problems[0]))
        for version in loaded:
            log.info("version_loaded", version=found.name, seconds=round(time.monotonic() - begin, 2))
            self._worker.submit(partial(self.drafter.begin, found.name, version))
        self._worker.submit(handed_over.set)

    def _free(self) -> None:
        """Free the memory of versions that are over, and remove their exports."""
        freed = False
        while True:
            try:
                dropped = self.drafter.dropped.get_nowait()
            except queue.Empty:
                break
            if dropped.export is not None:
                remove_export(dropped.export)
            del dropped
            freed = True
        if freed:
            gc.unfreeze()  # a start freezes its objects, and engines have cycles
            gc.collect()
            gc.freeze()
            give_freed_memory_back()
