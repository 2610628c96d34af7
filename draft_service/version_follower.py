"""Follows the folder of versions: loads new versions one at a time, beside the serving one, and hands them to the
drafter.

A version that has learned from a forgotten tenant is not loaded. If the serving version has learned from one, an
earlier version is loaded in its place before any new one.

The follower has a thread of its own. The drafter belongs to the draft loop's thread, so all changes reach it as actions
between two steps.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from draft_service.version import State
from draft_service.version_folder import MAX_VERSIONS, FoundVersion
from draft_service.version_loading import LoadedVersion, VersionRefusedError, remove_export
from draft_service.versions import HAS_LEARNED, VersionedDrafter
from specdec.engine.learned_from import LearnedFrom
from specdec.engine.memory import give_freed_memory_back
from specdec.engine.model_file import ModelDirectoryError
from specdec.serving.watched import Watched
from specdec.wire.file_version import Version as FileVersion

log = structlog.get_logger()

LOOK_SECONDS = 1.0
"""Interval in seconds between looks into the folder."""

BACK_SECONDS = 60.0
"""Seconds until the next attempt if no earlier version could be loaded."""

CLOSE_SECONDS = 10.0
"""Seconds that a stopping service waits for the version being loaded. Then the process ends without it."""


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
        self,
        folder: Watched[tuple[FoundVersion, ...]],
        loader: Loader,
        worker: Actions,
        drafter: VersionedDrafter,
        first: Path,
    ) -> None:
        """`worker` is the draft loop of `drafter`; `first`: the directory of the model that the service began with."""
        self.drafter = drafter
        self._first = FoundVersion(drafter.first, first, ())
        self._back_at = 0.0  # earliest `time.monotonic` at which to load an earlier version
        self._folder = folder
        self._loader = loader
        self._worker = worker
        self._tried: dict[str, FileVersion] = {}  # markers of versions that were loaded or refused
        self._waiting: list[FoundVersion] = []
        self._left_out: set[str] = set()  # new versions that wait until a version of their name has left memory
        self._handed_over: threading.Event | None = None  # set once the drafter has the latest loaded version
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="versions", daemon=True)

    def start(self) -> None:
        """Start looking: immediately, then every LOOK_SECONDS."""
        self._take(self._folder.contents)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:  # the service continues with the versions that it has
                log.exception("versions_not_followed")
            self._stopping.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Run one round: read the folder if it has changed, follow forgotten tenants, free memory, and load at most one
        version: an earlier one if the serving one is withdrawn, else the next waiting one if a trial may begin."""
        again = self._interrupted() or bool(self._left_out - self._taken())
        if self._folder.changed() or again:
            self._take(self._folder.contents)
        self._follow_forgotten()
        self._worker.submit(self.drafter.end_overdue)
        # In this order: the drafter has counted the last version loaded, and models that it no longer counts are freed.
        handed_over = self._handed_over is None or self._handed_over.is_set()
        earlier, is_free = self.drafter.earlier, self.drafter.is_free
        self._free()
        if not handed_over:
            return
        if earlier and time.monotonic() >= self._back_at:
            self._go_back(earlier)
        elif is_free:
            self._leave_out()  # names may have been taken since the last change of the folder
            if self._waiting:
                self._load(self._waiting.pop(0))

    def _take(self, found: tuple[FoundVersion, ...]) -> None:
        """Take the folder's contents: queue new versions, and versions with a changed marker, for a trial; tell the
        drafter which ones were removed."""
        present = {version.name for version in found}
        for name in [*(version.name for version in self._waiting), *self._tried]:
            if name not in present:
                self._tried.pop(name, None)
                self._worker.submit(partial(self.drafter.remove, name))
        newest = found[-MAX_VERSIONS:]
        self._waiting = [version for version in newest if self._tried.get(version.name) != version.marked]
        self._left_out.clear()
        self._leave_out()
        for version in self._waiting:
            self._worker.submit(partial(self.drafter.note, version.name, State.WAITING))

    def _leave_out(self) -> None:
        """Move waiting versions to `_left_out` if a version of the same name is in memory."""
        taken = self._taken()
        for name in [version.name for version in self._waiting if version.name in taken]:
            self._left_out.add(name)
            log.warning("version_left_out", version=name, why="a version of this name is served")
        self._waiting = [version for version in self._waiting if version.name not in taken]

    def _taken(self) -> set[str]:
        """Return the names of the versions in memory, and of the first one, which may serve again."""
        return {self.drafter.first, *(version.name for version in self.drafter.known if version.loaded is not None)}

    def _follow_forgotten(self) -> None:
        """Roll back what has learned from tenants forgotten by another service with this folder."""
        if self.drafter.forgotten.look():
            self._worker.submit(self._roll_back)

    def _roll_back(self) -> None:
        self.drafter.forget()

    def _interrupted(self) -> bool:
        """Mark versions whose trial was interrupted as not tried; return whether there were any."""
        found = False
        while True:
            try:
                self._tried.pop(self.drafter.interrupted.get_nowait(), None)
            except queue.Empty:
                return found
            found = True

    def _load(self, found: FoundVersion) -> None:
        """Load a version, and hand it over or record why it is refused."""
        self._tried[found.name] = found.marked
        try:
            concerned = self._is_concerned(found)
        except ModelDirectoryError as error:
            self._worker.submit(partial(self.drafter.note, found.name, State.REFUSED, str(error)))
            return
        if concerned:
            self._worker.submit(partial(self.drafter.note, found.name, State.FORGOTTEN, HAS_LEARNED))
            return
        self._worker.submit(partial(self.drafter.note, found.name, State.LOADING))
        result = self._loaded(found, self.drafter.expected)
        self._handed_over = handed_over = threading.Event()
        if isinstance(result, str):
            self._worker.submit(partial(self.drafter.note, found.name, State.REFUSED, result))
        elif result is not None:
            self._worker.submit(partial(self.drafter.begin, found.name, result))
        self._worker.submit(handed_over.set)

    def _is_concerned(self, found: FoundVersion) -> bool:
        """Return whether a version has learned from a forgotten tenant; ModelDirectoryError if its record of tenants
        cannot be read."""
        return self.drafter.forgotten.concerns(LearnedFrom.of(found.path))

    def _go_back(self, earlier: list[str]) -> None:
        """Load the first of these versions that is unchanged and has learned from no forgotten tenant, to serve again.
        The model that the service began with is exempt from both conditions."""
        present = {version.name: version for version in self._folder.contents}
        for name in earlier:
            found = self._first if name == self.drafter.first else present.get(name)
            if found is None or (found is not self._first and not self._may_serve_again(found)):
                continue
            result = self._loaded(found, None)  # its speed was measured before
            if result is None:
                return
            if isinstance(result, str):
                log.error("version_not_back", version=name, why=result)
                continue
            self._handed_over = handed_over = threading.Event()
            self._worker.submit(partial(self.drafter.go_back, name, result))
            self._worker.submit(handed_over.set)
            return
        self._back_at = time.monotonic() + BACK_SECONDS
        log.error("no_version_back", serving=self.drafter.serving.name, why=self.drafter.serving.reason)

    def _may_serve_again(self, found: FoundVersion) -> bool:
        try:
            return self._tried.get(found.name) == found.marked and not self._is_concerned(found)
        except ModelDirectoryError:
            return False

    def _loaded(self, found: FoundVersion, expected: Callable[[int], float] | None) -> LoadedVersion | str | None:
        """Load a version in a thread. Return the reason if it is refused, None if the service stops first."""
        results: list[LoadedVersion | str] = []

        def load() -> None:
            try:
                results.append(self._loader.load(found, expected))
            except VersionRefusedError as error:
                results.append(str(error))

        begin = time.monotonic()
        thread = threading.Thread(target=load, name="load-version", daemon=True)
        thread.start()
        while thread.is_alive() and not self._stopping.is_set():  # an export takes minutes
            thread.join(LOOK_SECONDS)
            self._follow_forgotten()
        if self._stopping.is_set() or not results:
            return None
        if not isinstance(results[0], str):
            log.info("version_loaded", version=found.name, seconds=round(time.monotonic() - begin, 2))
        return results[0]

    def _free(self) -> None:
        """Free the memory of dropped versions, and remove their exports."""
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
            gc.unfreeze()  # start-up freezes its objects, and engines have reference cycles
            gc.collect()
            gc.freeze()
            give_freed_memory_back()
