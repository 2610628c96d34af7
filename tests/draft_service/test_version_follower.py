"""Versions found in the folder are loaded one at a time, and reach the drafter between two steps."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from draft_service.draft_loop import DraftLoop
from draft_service.forgotten import Forgotten
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.version import State
from draft_service.version_folder import MAX_VERSIONS, FoundVersion, VersionsFolder
from draft_service.version_follower import VersionFollower
from draft_service.version_loading import LoadedVersion, VersionRefusedError
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import COMPLETE
from specdec.serving.watched import Watched
from specdec.v2 import draft_pb2, model_pb2
from tests.captured_logs import captured_logs
from tests.draft_service.fakes import Engine, session
from tests.draft_service.test_version_folder import version
from tests.draft_service.versioned import BAD, Guessing, Half, Service, loaded, raises


class AtOnce:
    """Runs actions immediately or, while it holds them, when they are released."""

    def __init__(self) -> None:
        self.holds = False
        self._held: list[Callable[[], None]] = []

    def submit(self, action: Callable[[], None]) -> None:
        self._held.append(action)
        self.release(only_if_free=True)

    def release(self, *, only_if_free: bool = False) -> None:
        while self._held and not (only_if_free and self.holds):
            self._held.pop(0)()


class Loader:
    """Makes an engine for each version, by what its directory holds."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.exports: Path | None = None

    def load(self, found: FoundVersion, expected: Callable[[int], float] | None) -> LoadedVersion:
        self.loaded.append(found.name)
        engine: Engine
        match (found.path / COMPLETE).read_text():
            case "bad":
                engine = Guessing(BAD)
            case "half":
                engine = Half()
            case "breaks":
                engine = Guessing(lasts=0, ends=raises)
            case "":
                engine = Guessing()
            case other:
                raise VersionRefusedError(f"it is {other}")
        model = loaded(engine)
        model.learned_from = LearnedFrom.of(found.path)
        if self.exports is not None:
            model.export = self.exports / found.name
            model.export.mkdir()
        return model


class Followed:
    """A service with a folder of versions."""

    def __init__(self, folder: Path, serving: Engine | None = None) -> None:
        self.folder, self.loader, self.actions = folder, Loader(), AtOnce()
        self.service = Service(serving or Guessing(), forgotten=Forgotten(folder))
        self.first = folder / ".first"  # not seen as a version
        self.first.mkdir()
        (self.first / COMPLETE).write_text("bad")
        watched = Watched(VersionsFolder(folder))
        self.follower = VersionFollower(watched, self.loader, self.actions, self.service.drafter, self.first)

    def add(self, name: str, what: str = "", at: int = 100, tenant: str = "") -> None:
        """Add a version of a kind that the loader knows; if a tenant is named, it has learned from a text of theirs."""
        directory = version(self.folder, name, at)
        if tenant:
            learned_from = LearnedFrom().with_texts({tenant_digest(tenant): 1.0})
            (directory / LEARNED_FROM).write_text(json.dumps(learned_from.content))
        (directory / COMPLETE).write_text(what)
        os.utime(directory / COMPLETE, (at, at))

    def states(self) -> dict[str, State]:
        return {version.name: version.state for version in self.service.drafter.known}


def test_two_versions_at_once_are_tried_one_after_the_other(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v2", "bad", at=200)
    found.add("v1", "bad", at=100)
    found.follower.look()
    assert found.states() == {"first": State.SERVING, "v1": State.CANARY, "v2": State.WAITING}
    found.follower.look()
    assert found.loader.loaded == ["v1"]
    found.service.try_on()
    assert found.states()["v1"] is State.WORSE
    found.follower.look()
    assert found.states()["v2"] is State.CANARY


def test_one_that_appears_during_a_trial_waits_for_its_end(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1")
    found.follower.look()
    found.add("v2", at=200)
    found.follower.look()
    assert found.states() == {"first": State.SERVING, "v1": State.CANARY, "v2": State.WAITING}
    kept = found.service.open()
    with pytest.raises(AssertionError, match="does not end"):
        found.service.try_on()
    found.follower.look()
    assert found.states() == {"first": State.RETIRED, "v1": State.SERVING, "v2": State.WAITING}
    found.service.loop.detach(kept)
    found.follower.look()
    assert found.states() == {"first": State.ENDED, "v1": State.SERVING, "v2": State.CANARY}


def test_a_refused_version_is_named_and_the_next_one_is_tried(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", "truncated")
    found.add("v2", at=200)
    with captured_logs() as lines:
        found.follower.look()
        found.follower.look()
    assert found.states() == {"first": State.SERVING, "v1": State.REFUSED, "v2": State.CANARY}
    assert found.service.version("v1").reason == "it is truncated"
    (refused,) = [line for line in lines if line["event"] == "version_refused"]
    assert (refused["version"], refused["why"]) == ("v1", "it is truncated")
    assert found.service.drafter.outcomes["refused"] == 1


def test_it_is_tried_again_only_when_its_marker_changes(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", "corrupt")
    found.follower.look()
    (tmp_path / "v1" / "notes.txt").write_text("no marker")
    for _ in range(3):
        found.follower.look()
    assert found.loader.loaded == ["v1"]
    (tmp_path / "v1" / COMPLETE).write_text("")
    found.follower.look()
    assert found.loader.loaded == ["v1", "v1"]
    assert found.states()["v1"] is State.CANARY


def test_a_version_with_the_name_of_one_in_memory_is_left_out(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("first")
    with captured_logs() as lines:
        found.follower.look()
    assert found.loader.loaded == []
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["version_left_out"]


def test_the_next_one_is_not_loaded_before_the_drafter_has_the_last(tmp_path: Path) -> None:
    """The drafter's thread may be in a long step."""
    found = Followed(tmp_path)
    found.actions.holds = True
    found.add("v1")
    found.add("v2", at=200)
    for _ in range(3):
        found.follower.look()
    assert found.loader.loaded == ["v1"]
    found.actions.release()
    found.follower.look()
    found.actions.release()
    assert found.states() == {"first": State.SERVING, "v1": State.CANARY, "v2": State.WAITING}


def test_a_version_replaced_during_its_trial_is_tried_afterwards(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", "bad")
    found.follower.look()
    assert found.states()["v1"] is State.CANARY
    os.utime(tmp_path / "v1" / COMPLETE, (200, 200))
    found.follower.look()
    assert found.loader.loaded == ["v1"]
    found.service.try_on()
    assert found.states()["v1"] is State.WORSE
    found.follower.look()
    found.follower.look()
    assert found.loader.loaded == ["v1", "v1"]
    assert found.states()["v1"] is State.CANARY


def test_a_version_replaced_before_its_trial_is_tried_again_once_it_has_left_memory(tmp_path: Path) -> None:
    """Its marker changes while the drafter's thread is in a long step."""
    found = Followed(tmp_path, Guessing(BAD))
    found.actions.holds = True
    found.add("v1", "half")
    found.follower.look()
    os.utime(tmp_path / "v1" / COMPLETE, (200, 200))
    found.follower.look()
    found.actions.holds = False
    found.actions.release()
    found.service.try_on()
    assert found.states()["v1"] is State.SERVING
    found.follower.look()
    assert found.loader.loaded == ["v1"]
    found.add("v2", at=300)
    found.follower.look()
    found.service.try_on()
    assert found.states() == {"first": State.ENDED, "v1": State.ENDED, "v2": State.SERVING}
    assert found.loader.loaded == ["v1", "v2"]
    found.follower.look()
    assert found.loader.loaded == ["v1", "v2", "v1"]
    assert found.states()["v1"] is State.CANARY


def test_a_version_on_trial_stays_however_many_there_are(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("oldest")
    found.follower.look()
    assert found.states()["oldest"] is State.CANARY
    for number in range(MAX_VERSIONS):
        found.add(f"v{number}", at=200 + number)
    found.follower.look()
    assert found.states()["oldest"] is State.CANARY


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_removed_directory_ends_a_trial_or_the_wait_for_one(tmp_path: Path, name: str) -> None:
    found = Followed(tmp_path)
    found.add("v1")
    found.add("v2", at=200)
    found.follower.look()
    shutil.rmtree(tmp_path / name)
    found.follower.look()
    left = {"v1": {"first": State.SERVING, "v1": State.REMOVED, "v2": State.CANARY}}
    assert found.states() == left.get(name, {"first": State.SERVING, "v1": State.CANARY})


def test_a_version_that_comes_back_is_tried_again(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", "bad")
    found.follower.look()
    found.service.try_on()
    (tmp_path / "v1").rename(tmp_path / ".v1")
    found.follower.look()
    (tmp_path / ".v1").rename(tmp_path / "v1")
    found.follower.look()
    assert found.loader.loaded == ["v1", "v1"]


def test_the_export_of_a_version_that_is_over_is_removed(tmp_path: Path) -> None:
    versions, exports = tmp_path / "versions", tmp_path / "exports"
    versions.mkdir()
    exports.mkdir()
    found = Followed(versions)
    found.loader.exports = exports
    found.add("v1", "breaks")
    found.follower.look()
    found.service.open(is_new=True)
    found.service.loop.turn()
    assert found.states()["v1"] is State.FAILED
    assert (exports / "v1").is_dir()
    found.follower.look()
    assert not (exports / "v1").exists()
    assert versions.is_dir()


def test_a_folder_that_cannot_be_followed_leaves_the_service_as_it_is(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    versions.mkdir()
    found = Followed(versions)
    found.add("v1")
    found.follower.look()
    versions.rename(tmp_path / "elsewhere")
    found.follower.look()
    assert found.states()["v1"] is State.CANARY


async def test_statistics_name_the_versions(tmp_path: Path) -> None:
    """The handshake names the version that drafts; metrics have a value for each version."""
    found = Followed(tmp_path)
    identity = model_pb2.ModelIdentity(model="m", model_fingerprint="first", vocabulary_size=16, context_tokens=99)
    service = DraftServicer(found.service.loop, identity, DraftLimits(), versions=found.follower)
    found.add("v1")
    found.add("v2", "corrupt", at=50)
    found.follower.look()
    found.follower.look()
    opened = found.service.open(is_new=True)
    found.service.write(opened, 4)
    told = await service.GetStats(draft_pb2.DraftServiceGetStatsRequest(), None)  # type: ignore[arg-type]
    assert [(each.name, each.state, each.reason) for each in told.versions] == [
        ("first", draft_pb2.DRAFT_VERSION_STATE_SERVING, ""),
        ("v2", draft_pb2.DRAFT_VERSION_STATE_REFUSED, "it is corrupt"),
        ("v1", draft_pb2.DRAFT_VERSION_STATE_CANARY, ""),
    ]
    canary = told.versions[2]
    assert (canary.sessions, canary.committed_tokens, canary.guessed_tokens) == (1, 4, 4)
    assert canary.passes > 0
    assert canary.busy_us > 0
    assert told.version_outcomes["refused"] == 1
    assert told.version_outcomes["promoted"] == 0
    assert told.identity.model_fingerprint == "0" * 64
    handshake = service.opened(opened).opened
    assert (handshake.version, handshake.identity.model, handshake.identity.model_fingerprint) == ("v1", "m", "0" * 64)
    assert service.opened(session()).opened.version == ""
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in service.metrics()
        for sample in family.samples
    }
    assert samples["specdec_draft_version_state", "v1", "canary"] == 1
    assert samples["specdec_draft_version_committed_tokens_total", "v1"] == 4
    assert samples["specdec_draft_version_outcomes_total", "refused"] == 1
    assert samples["specdec_draft_version_outcomes_total", "worse"] == 0


async def test_without_versions_nothing_is_told_of_them() -> None:
    loop = DraftLoop(LanguageModelDrafter(Engine()))
    service = DraftServicer(loop, model_pb2.ModelIdentity(), DraftLimits())
    told = await service.GetStats(draft_pb2.DraftServiceGetStatsRequest(), None)  # type: ignore[arg-type]
    assert not told.versions
    assert not told.version_outcomes
    assert not [sample for family in service.metrics() for sample in family.samples if "_version_" in sample.name]


def test_it_follows_in_a_thread_of_its_own_until_it_is_closed(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1")
    begun = threading.Event()
    submit = found.actions.submit

    class Told(AtOnce):
        def submit(self, action: Callable[[], None]) -> None:
            submit(action)
            if found.states().get("v1") is State.CANARY:
                begun.set()

    watched = Watched(VersionsFolder(tmp_path))
    follower = VersionFollower(watched, found.loader, Told(), found.service.drafter, found.first)
    follower.start()
    assert begun.wait(30)
    follower.close()
    assert "versions" not in {thread.name for thread in threading.enumerate()}
