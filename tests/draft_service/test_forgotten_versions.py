"""Versions that have learned from a forgotten tenant are neither tried nor served; a serving one is replaced."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draft_service import version_follower
from draft_service.forgotten import Forgotten
from draft_service.version import State
from draft_service.versions import HAS_LEARNED
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import COMPLETE
from tests.captured_logs import captured_logs
from tests.draft_service.test_version_follower import Followed
from tests.draft_service.versioned import BAD, GOOD, Guessing

CLEAN, CANARY, SERVING, FORGOTTEN = "", State.CANARY, State.SERVING, State.FORGOTTEN


def forget(found: Followed, tenant: str = "acme") -> list[str]:
    found.service.drafter.forgotten.add(tenant)
    return found.service.drafter.forget()


def promoted(found: Followed, name: str) -> None:
    """Try the waiting version until it serves, and no text of the version before is left."""
    found.follower.look()
    found.service.try_on()
    found.follower.look()
    assert found.states()[name] is SERVING


def test_one_that_has_learned_from_a_forgotten_tenant_is_not_even_loaded(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    assert forget(found) == []
    found.add("v1", tenant="acme")
    found.add("v2", at=200, tenant="other")
    found.follower.look()
    found.follower.look()
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN, "v2": CANARY}
    assert found.loader.loaded == ["v2"]
    assert found.service.version("v1").reason == HAS_LEARNED
    assert found.service.drafter.outcomes["forgotten"] == 1


def test_a_tenant_forgotten_elsewhere_counts_while_a_version_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load with an export takes minutes."""
    monkeypatch.setattr(version_follower, "LOOK_SECONDS", 0.01)
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", tenant="acme")
    promoted(found, "v1")
    found.add("v2", at=200)
    begun, end, load = threading.Event(), threading.Event(), found.loader.load

    def slow(*given: Any) -> Any:
        begun.set()
        assert end.wait(10)
        return load(*given)

    monkeypatch.setattr(found.loader, "load", slow)
    looking = threading.Thread(target=found.follower.look)
    looking.start()
    try:
        assert begun.wait(10)
        Forgotten(tmp_path).add("acme")
        deadline = time.monotonic() + 10
        while not found.service.drafter.earlier and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found.service.drafter.earlier == ["first"]
    finally:
        end.set()
        looking.join()


def test_one_of_which_nobody_can_tell_is_refused(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1")
    (tmp_path / "v1" / LEARNED_FROM).write_text("{}")
    found.follower.look()
    assert found.states()["v1"] is State.REFUSED
    assert f"{LEARNED_FROM}: salt is missing" in found.service.version("v1").reason
    assert found.loader.loaded == []


def test_a_canary_is_rolled_back_at_once_and_its_texts_go_on(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", "bad", tenant="acme")
    found.follower.look()
    text = found.service.open(is_new=True)
    assert found.service.proposes(text) == {BAD}
    assert forget(found, "other") == []
    assert found.states()["v1"] is CANARY
    assert forget(found) == ["v1"]
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN}
    assert found.service.drafter.version_of(text) is found.service.drafter.serving
    assert found.service.proposes(text) == {GOOD}
    assert not found.service.failed


def test_one_that_was_being_loaded_does_not_begin(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", tenant="acme")
    found.actions.holds = True
    found.follower.look()
    assert found.loader.loaded == ["v1"]
    assert forget(found) == []
    found.actions.release()
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN}
    assert not found.service.drafter.dropped.empty()


def test_the_serving_one_gives_way_to_the_model_as_started(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", tenant="acme")
    promoted(found, "v1")
    text = found.service.open()
    assert found.service.proposes(text) == {GOOD}
    assert forget(found) == ["v1"]
    assert found.service.version("v1").reason.startswith(HAS_LEARNED)
    assert found.service.proposes(text) == {GOOD}  # until another version is loaded
    found.follower.look()
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN}
    assert found.service.drafter.version_of(text) is found.service.version("first")
    assert found.service.proposes(text) == {BAD}
    assert found.service.drafter.is_free
    assert not found.service.failed
    assert forget(found, "other") == []


def keep(found: Followed) -> None:
    """Leave the first version as it is."""


def change(found: Followed) -> None:
    os.utime(found.folder / "v1" / COMPLETE, (101, 101))


def teach(found: Followed) -> None:
    """Replace the file beside the weights by one that names the tenant."""
    learned_from = LearnedFrom().with_texts({tenant_digest("acme"): 1.0})
    (found.folder / "v1" / LEARNED_FROM).write_text(str(learned_from.content).replace("'", '"'))


def spoil(found: Followed) -> None:
    (found.folder / "v1" / LEARNED_FROM).write_text("not JSON")


def remove(found: Followed) -> None:
    shutil.rmtree(found.folder / "v1")


@pytest.mark.parametrize(
    ("tenant", "happens", "serves"),
    [
        (CLEAN, keep, "v1"),
        ("acme", keep, "first"),
        *(
            pytest.param(*case, marks=pytest.mark.verify)
            for case in (
                ("other", keep, "v1"),
                (CLEAN, change, "first"),
                (CLEAN, teach, "first"),
                (CLEAN, spoil, "first"),
                (CLEAN, remove, "first"),
            )
        ),
    ],
)
def test_it_gives_way_to_the_last_one_that_may_serve(
    tmp_path: Path, tenant: str, happens: Callable[[Followed], None], serves: str
) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", "half", tenant=tenant)
    promoted(found, "v1")
    found.add("v2", at=200, tenant="acme")
    promoted(found, "v2")
    happens(found)
    assert forget(found) == ["v2"]
    found.follower.look()
    assert found.service.drafter.serving.name == serves
    assert found.states()["v2"] is FORGOTTEN
    assert found.states()[serves] is SERVING


def test_the_one_before_is_taken_at_once_while_it_is_in_memory(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", tenant="acme")
    kept = found.service.open()
    found.follower.look()
    with pytest.raises(AssertionError, match="does not end"):
        found.service.try_on()
    assert found.states() == {"first": State.RETIRED, "v1": SERVING}
    new = found.service.open()
    assert forget(found) == ["v1"]
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN}
    assert {found.service.drafter.version_of(text) for text in (kept, new)} == {found.service.version("first")}
    assert found.service.drafter.is_free
    assert found.loader.loaded == ["v1"]


def test_a_retired_one_loses_its_texts(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", "half", tenant="acme")
    promoted(found, "v1")
    kept = found.service.open()
    found.add("v2", at=200)
    found.follower.look()
    with pytest.raises(AssertionError, match="does not end"):
        found.service.try_on(200)
    assert found.states()["v1"] is State.RETIRED
    assert forget(found) == ["v1"]
    assert found.states()["v1"] is FORGOTTEN
    assert found.service.drafter.version_of(kept) is found.service.version("v2")


def test_a_trial_beside_one_that_is_withdrawn_begins_again(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", tenant="acme")
    promoted(found, "v1")
    found.add("v2", at=200)
    found.follower.look()
    assert found.states()["v2"] is CANARY
    assert forget(found) == ["v1"]
    found.follower.look()
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN, "v2": State.WAITING}
    found.follower.look()
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN, "v2": CANARY}
    assert found.loader.loaded == ["v1", "v2", "first", "v2"]


def test_one_that_was_loaded_beside_it_is_tried_later(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", tenant="acme")
    promoted(found, "v1")
    found.add("v2", at=200)
    found.actions.holds = True
    found.follower.look()
    assert forget(found) == ["v1"]
    found.actions.release()
    found.actions.holds = False
    for _ in range(3):
        found.follower.look()
    assert found.states() == {"first": SERVING, "v1": FORGOTTEN, "v2": CANARY}


def test_it_drafts_on_while_no_other_can_be_loaded(tmp_path: Path) -> None:
    found = Followed(tmp_path, Guessing(BAD))
    found.add("v1", tenant="acme")
    promoted(found, "v1")
    (found.first / COMPLETE).write_text("truncated")
    forget(found)
    with captured_logs() as lines:
        for _ in range(3):
            found.follower.look()
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["version_not_back", "no_version_back"]
    assert found.service.drafter.serving.name == "v1"
    found.add("v2", at=200)
    found.follower.look()
    assert found.states()["v2"] is State.WAITING


def test_the_model_as_started_stays_whatever_it_has_learned(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    assert found.service.drafter.serving.loaded is not None
    found.service.drafter.serving.loaded.learned_from = LearnedFrom().with_texts({tenant_digest("acme"): 1.0})
    assert forget(found) == []
    assert found.service.drafter.serving.name == "first"


def test_what_another_service_with_the_folder_has_forgotten_counts(tmp_path: Path) -> None:
    found = Followed(tmp_path)
    found.add("v1", tenant="acme")
    found.follower.look()
    assert found.states()["v1"] is CANARY
    Forgotten(tmp_path).add("acme")
    found.follower.look()
    assert found.states()["v1"] is FORGOTTEN
