"""Forgotten tenants: remembered over a restart, and by all services with the same folder of versions."""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any, cast

import pytest

from draft_service import forgotten
from draft_service.draft_loop import DraftLoop
from draft_service.forgotten import CLOCKS_APART_SECONDS, FOLDER, Forgotten
from draft_service.language_model import LanguageModelDrafter
from draft_service.learning_servicer import Learning, LearningServicer
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from draft_service.traffic import Traffic
from specdec.decoding.calibration import Calibration
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.learned_from import LearnedFrom, tenant_digest
from specdec.engine.model_file import ModelDirectoryError
from specdec.serving.errors import NotRememberedError
from specdec.v2 import learning_pb2
from tests.cpu_time import taking_less_than
from tests.draft_service.fakes import VOCABULARY, Engine
from tests.stack import until


def learning(tenant: str) -> DrafterSession:
    """Return a session with a text of two tokens that may be kept."""
    sampler = RequestSampler(Sampling())
    request = DrafterSessionRequest([1, 2], [], sampler, frozenset(), 20, 100, tenant=tenant, learn=True)
    text = DrafterSession(request, ExpansionPolicy(max_nodes=8), VOCABULARY, Calibration())
    text.commit(2, [4, 5])
    return text


def learned(tenant: str, at: float) -> LearnedFrom:
    return LearnedFrom().with_texts({tenant_digest(tenant): at})


@pytest.mark.parametrize("remembers", [True, False])
def test_a_restart_forgets_nobody_where_there_is_a_folder(tmp_path: Path, remembers: bool) -> None:
    versions = tmp_path if remembers else None
    Forgotten(versions, lambda: 1000.0).add("acme")
    restarted = Forgotten(versions)
    assert restarted.concerns(learned("acme", 900.0)) is remembers
    assert restarted.keeps_out("acme", 900.0) is remembers
    assert not restarted.concerns(learned("other", 900.0))
    assert not restarted.keeps_out("other", 900.0)
    assert not restarted.concerns(None)


def test_texts_from_afterwards_count_again() -> None:
    known = Forgotten(clock=lambda: 1000.0)
    known.add("acme")
    for later, out in ((0.0, True), (CLOCKS_APART_SECONDS, True), (CLOCKS_APART_SECONDS + 1, False)):
        assert known.concerns(learned("acme", 1000.0 + later)) is out
        assert known.keeps_out("acme", 1000.0 + later) is out


def test_the_last_time_counts(tmp_path: Path) -> None:
    """Even if the service that forgets a tenant last has a clock behind the others'."""
    behind, ahead = Forgotten(tmp_path, lambda: 1000.0), Forgotten(tmp_path, lambda: 5000.0)
    for service in (behind, ahead, behind):
        service.add("acme")
    for known in (behind, Forgotten(tmp_path)):
        assert known.concerns(learned("acme", 5000.0))
        assert not known.concerns(learned("acme", 5001.0 + CLOCKS_APART_SECONDS))


def test_services_with_the_same_folder_know_the_same(tmp_path: Path) -> None:
    one, other = Forgotten(tmp_path, lambda: 1000.0), Forgotten(tmp_path)
    assert not other.look()
    one.add("acme")
    one.add("")
    assert not other.concerns(learned("acme", 900.0))
    assert other.look()
    assert not other.look()
    assert other.concerns(learned("acme", 900.0))
    assert other.concerns(learned("", 900.0))
    assert not list(tmp_path.glob(f"{FOLDER}/.*"))  # nothing half-written is left


def test_a_folder_without_news_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower of versions looks once a second, beside the draft loop."""
    monkeypatch.setattr(forgotten, "SETTLED_SECONDS", 0.0)
    (tmp_path / FOLDER).mkdir()
    for number in range(1000):
        (tmp_path / FOLDER / tenant_digest(str(number))).write_text("1000")
    known = Forgotten(tmp_path)
    with taking_less_than(0.1):
        for _ in range(100):
            assert not known.look()
    Forgotten(tmp_path, lambda: 5000.0).add("5")
    assert known.look()
    assert known.concerns(learned("5", 5000.0))


def test_no_name_is_written(tmp_path: Path) -> None:
    Forgotten(tmp_path).add("acme")
    (file,) = (tmp_path / FOLDER).iterdir()
    assert file.name == tenant_digest("acme")
    assert b"acme" not in file.read_bytes()


@pytest.mark.parametrize("content", ["", "nan", "-1", "yesterday"])
def test_a_file_without_a_time_counts_for_all_times(tmp_path: Path, content: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / tenant_digest("acme")).write_text(content)
    (tmp_path / FOLDER / "notes.txt").write_text("1000")
    known = Forgotten(tmp_path)
    assert known.concerns(learned("acme", 1e12))
    assert known.keeps_out("acme", 1e12)
    known.add("acme")
    for now in (known, Forgotten(tmp_path)):
        now.look()
        assert not now.keeps_out("acme", 1e12)


def test_a_file_that_cannot_be_read_for_a_while_counts_for_all_times_meanwhile(tmp_path: Path) -> None:
    known = Forgotten(tmp_path, lambda: 1000.0)
    known.add("acme")
    file = tmp_path / FOLDER / tenant_digest("acme")
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    assert known.look()
    assert known.keeps_out("acme", 1e12)
    file.rmdir()
    file.write_bytes(content)
    known.look()
    assert known.keeps_out("acme", 1000.0)
    assert not known.keeps_out("acme", 1e12)


def test_what_cannot_be_written_counts_until_the_restart(tmp_path: Path) -> None:
    known = Forgotten(tmp_path, lambda: 1000.0)
    (tmp_path / FOLDER).write_text("not a folder")
    with pytest.raises(NotRememberedError, match=rf"could not be written: {tmp_path}/{FOLDER}"):
        known.add("acme")
    assert known.concerns(learned("acme", 900.0))
    assert not known.look()  # logs the failure, and goes on with the known tenants
    assert known.concerns(learned("acme", 900.0))


def test_a_service_that_cannot_tell_who_was_forgotten_does_not_start(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("not a folder")
    with pytest.raises(ModelDirectoryError, match=f"{FOLDER}: cannot be read"):
        Forgotten(tmp_path)


def test_the_number_of_tenants_is_bounded(tmp_path: Path) -> None:
    remembering, passing = Forgotten(tmp_path, lambda: 1000.0, 2), Forgotten(None, lambda: 1000.0, 2)
    for tenant in ("a", "b"):
        remembering.add(tenant)
    with pytest.raises(NotRememberedError, match="has 2 tenants, must have at most 2"):
        remembering.add("c")
    assert all(remembering.concerns(learned(tenant, 900.0)) for tenant in "abc")
    remembering.add("b")  # already remembered
    for tenant in ("a", "b", "a", "c"):
        passing.add(tenant)
    assert [passing.concerns(learned(tenant, 900.0)) for tenant in "abc"] == [False, True, True]


async def test_the_answer_is_about_the_tenant_that_was_named() -> None:
    loop = DraftLoop(LanguageModelDrafter(Engine()))
    service = LearningServicer(loop, Learning("k" * 16, Forgotten(), learned("acme", 900.0)))
    for tenant, told in (("acme", True), ("other", False)):
        gone = await service.Forget(learning_pb2.ForgetRequest(tenant=tenant), cast("Any", None))
        assert gone.first_learned is told


async def test_a_tenant_is_forgotten_in_whole_even_if_the_caller_leaves() -> None:
    began, goes_on = asyncio.Event(), threading.Event()
    running = asyncio.get_running_loop()

    class SlowDisk(Forgotten):
        def add(self, tenant: str) -> None:
            running.call_soon_threadsafe(began.set)
            goes_on.wait(60)
            super().add(tenant)

    forgotten = SlowDisk()
    traffic = Traffic(1000, forgotten)
    traffic.keep(learning("a"))
    service = LearningServicer(DraftLoop(LanguageModelDrafter(Engine()), traffic), Learning("k" * 16, forgotten))
    call = asyncio.create_task(service.Forget(learning_pb2.ForgetRequest(tenant="a"), cast("Any", None)))
    await began.wait()
    call.cancel()
    await asyncio.wait([call])
    assert len(traffic.texts()) == 1
    goes_on.set()
    await until(lambda: not traffic.texts())


async def test_texts_that_are_being_read_are_not_sent_once_they_are_forgotten() -> None:
    traffic = Traffic(1000)
    for tenant in "aab":
        traffic.keep(learning(tenant))
    sent: list[str] = []
    kept = [weakref.ref(text) for text in traffic.texts()]

    class Reader:
        async def write(self, message: learning_pb2.GetTrafficResponse) -> None:
            sent.extend(text.tenant_digest for text in message.texts)
            if len(sent) == 1:
                traffic.forget("a")
                assert [text() is None for text in kept] == [True, True, False]  # not in memory either

    service = LearningServicer(DraftLoop(LanguageModelDrafter(Engine()), traffic), Learning("k" * 16, Forgotten()))
    service.tokens_a_message = 1
    await service.GetTraffic(learning_pb2.GetTrafficRequest(), cast("Any", Reader()))
    assert sent == [tenant_digest(tenant) for tenant in "ab"]
