"""Versions of a draft's model: a canary is promoted or rolled back."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service import versions
from draft_service.pass_times import PassTimes
from draft_service.version import State
from draft_service.version_loading import LoadedVersion
from draft_service.version_trial import SPEED_PASSES, TrialLimits
from draft_service.versions import MAX_KNOWN
from specdec.decoding.sampling import Rule
from specdec.engine.learned_from import LearnedFrom, tenant_digest
from tests.draft_service.fakes import session
from tests.draft_service.versioned import BAD, GOOD, LIMITS, Guessing, Service, loaded, not_a_number


def test_sessions_are_drawn_for_the_canary_while_there_is_one() -> None:
    service = Service(Guessing())
    before = service.open(is_new=True)
    canary = service.begin("v2", Guessing())
    one, other = service.open(is_new=True), service.open()
    versions = [service.drafter.version_of(each) for each in (before, one, other)]
    assert [version and version.name for version in versions] == ["first", "v2", "first"]
    assert [version.sessions for version in service.drafter.known] == [2, 1]
    assert (canary.state, service.drafter.is_free) == (State.CANARY, False)


def test_equal_versions_guess_equally_much_beside_many_texts() -> None:
    """If each version had a whole pass, the canary's few texts would get more nodes each than those of the other."""
    service = Service(Guessing(), TrialLimits(share=0.1, tokens=1 << 30))
    canary = service.begin("v2", Guessing())
    texts = [service.open(is_new=number % 10 == 0, what=session(tokens=500, max_nodes=24)) for number in range(60)]
    for _ in range(50):
        service.loop.turn()
        service.loop.turn()
        for text in texts:  # the target accepts up to seven candidates, and adds a token
            accepted, node = 0, text.tree.root
            while accepted < 7 and GOOD in node.children:
                accepted, node = accepted + 1, node.children[GOOD]
            service.loop.commit(text, text.tree.base, [GOOD] * (accepted + 1), time.monotonic())
    first = service.version("first")
    assert canary.guessed / canary.committed == pytest.approx(first.guessed / first.committed, abs=0.05)


def test_a_better_version_is_promoted_and_running_texts_stay() -> None:
    service = Service(Guessing(BAD))
    canary = service.begin("v2", Guessing())
    running_text = service.open()
    with pytest.raises(AssertionError, match="does not end"):
        service.try_on()  # not free: the first version has a session left
    first = service.version("first")
    assert (canary.state, first.state, first.sessions) == (State.SERVING, State.RETIRED, 1)
    assert service.drafter.outcomes["promoted"] == 1
    new = service.open(is_new=True)
    assert service.drafter.version_of(new) is canary
    assert (service.proposes(running_text), service.proposes(new)) == ({BAD}, {GOOD})
    assert service.drafter.dropped.empty()
    service.loop.detach(running_text)
    assert (first.state, first.loaded, service.drafter.is_free) == (State.ENDED, None, True)
    assert isinstance(service.drafter.dropped.get_nowait(), LoadedVersion)
    assert not service.failed


def test_a_text_that_does_not_end_moves_from_a_retired_version(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(Guessing(BAD))
    service.begin("v2", Guessing())
    running_text = service.open()
    with pytest.raises(AssertionError, match="does not end"):
        service.try_on()
    first = service.version("first")
    service.drafter.end_overdue()
    assert first.state is State.RETIRED
    monkeypatch.setattr(versions, "RETIRED_SECONDS", -1.0)
    service.drafter.end_overdue()
    assert (first.state, first.loaded, service.drafter.is_free) == (State.ENDED, None, True)
    assert service.drafter.version_of(running_text) is service.drafter.serving
    assert service.proposes(running_text) == {GOOD}


def test_a_worse_version_is_rolled_back_within_the_tokens_and_its_texts_go_on() -> None:
    service = Service(Guessing())
    canary = service.begin("v2", Guessing(BAD))
    moved = service.open(is_new=True)
    assert service.proposes(moved) == {BAD}
    service.try_on()
    assert canary.state is State.WORSE
    assert canary.committed < LIMITS.tokens
    assert "guessed 0.0% of the tokens" in canary.reason
    assert (canary.sessions, canary.loaded) == (0, None)
    assert service.drafter.outcomes["worse"] == 1
    assert service.drafter.version_of(moved) is service.drafter.serving
    assert service.proposes(moved) == {GOOD}
    service.write(moved, 20)
    assert not service.failed


def test_one_that_is_as_good_is_given_up_after_the_tokens() -> None:
    service = Service(Guessing(), TrialLimits(share=0.5, tokens=1000))
    canary = service.begin("v2", Guessing())
    service.try_on(120)
    assert (canary.state, canary.committed) == (State.UNDECIDED, 1000)
    assert service.drafter.serving.name == "first"


def test_a_slow_version_is_rolled_back() -> None:
    def sleeps(logits: NDArray[np.float32]) -> NDArray[np.float32]:
        time.sleep(0.002)
        return logits

    service = Service(Guessing(), times=PassTimes({4: 1e-4, 8: 1.1e-4}))
    canary = service.begin("v2", Guessing(lasts=0, ends=sleeps))
    moved = service.open(is_new=True)
    service.write(moved, 2 * SPEED_PASSES)
    assert canary.state is State.SLOW
    assert canary.passes == SPEED_PASSES
    assert service.drafter.version_of(moved) is service.drafter.serving
    assert not service.failed


def test_a_version_of_the_same_speed_is_not_slow() -> None:
    service = Service(Guessing(), times=PassTimes({4: 1.0, 8: 1.1}))
    service.begin("v2", Guessing())
    service.write(service.open(is_new=True), 100)
    assert not service.drafter.is_free


def test_once_promoted_it_is_the_serving_version() -> None:
    """Numbers that are not finite then give no candidates, as with any draft."""
    engine = Guessing()
    service = Service(Guessing(BAD))
    service.begin("v2", engine)
    service.try_on()
    engine.lasts, engine.ends = 0, not_a_number
    opened = service.open()
    service.write(opened, 5)
    assert not service.failed
    assert not opened.tree.size
    assert service.loop.works


def test_a_directory_that_is_removed_ends_its_trial() -> None:
    service = Service(Guessing())
    canary = service.begin("v2", Guessing())
    moved = service.open(is_new=True)
    service.drafter.note("v3", State.WAITING)
    for name in ("v2", "v3", "first", "unknown"):
        service.drafter.remove(name)
    assert canary.state is State.REMOVED
    assert [version.name for version in service.drafter.known] == ["first", "v2"]
    assert service.drafter.version_of(moved) is service.drafter.serving


def test_one_that_is_removed_while_it_is_loaded_does_not_begin() -> None:
    service = Service(Guessing())
    service.drafter.note("v2", State.LOADING)
    service.drafter.remove("v2")
    service.drafter.begin("v2", loaded(Guessing()))
    assert service.drafter.is_free
    assert not service.drafter.dropped.empty()


def test_refused_versions_are_counted_and_may_come_again() -> None:
    service = Service(Guessing())
    service.drafter.note("v2", State.REFUSED, "no weights")
    version = service.version("v2")
    assert (version.state, version.reason) == (State.REFUSED, "no weights")
    assert service.drafter.outcomes["refused"] == 1
    assert service.begin("v2", Guessing()).state is State.CANARY
    service.drafter.note("v2", State.WAITING)  # no-op for a live version
    assert service.version("v2").state is State.CANARY


def test_figures_of_versions_that_are_over_are_bounded() -> None:
    service = Service(Guessing())
    for number in range(3 * MAX_KNOWN):
        service.drafter.note(f"v{number}", State.REFUSED, "no weights")
    known = service.drafter.known
    assert len(known) == MAX_KNOWN
    assert (known[0].name, known[-1].name) == ("first", f"v{3 * MAX_KNOWN - 1}")


def test_contrastive_texts_are_not_served() -> None:
    """Their tokens depend on the draft's model."""
    assert Service(Guessing()).drafter.rules == {Rule.COUPLED, Rule.REJECTION}


def test_figures_are_of_the_version_that_drafted() -> None:
    service = Service(Guessing())
    service.begin("v2", Guessing(BAD))
    service.write(service.open(is_new=True), 10)
    first, second = service.version("first"), service.version("v2")
    assert (first.committed, first.passes) == (0, 0)
    assert (second.committed, second.guessed) == (10, 0)
    assert second.passes == service.loop.steps > 0
    assert 0 < second.busy <= service.loop.stats.busy


def write_until_the_verdict(service: Service) -> None:
    number = 0
    while service.version("v2").state is State.CANARY:
        text = service.open(is_new=number % 2 == 0)
        service.write(text, 20)
        service.loop.detach(text)
        number += 1


def remove(service: Service) -> None:
    service.drafter.remove("v2")


def forget(service: Service) -> None:
    service.drafter.forgotten.add("acme")
    service.drafter.forget()


@pytest.mark.parametrize(
    ("tokens", "end", "state"),
    [
        ([BAD, GOOD], write_until_the_verdict, State.SERVING),
        ([GOOD, BAD], write_until_the_verdict, State.WORSE),
        ([GOOD, GOOD], remove, State.REMOVED),
        ([BAD, GOOD, GOOD], forget, State.WAITING),  # interrupted: the serving version is withdrawn
    ],
)
def test_an_ended_trial_keeps_no_session(tokens: list[int], end: Callable[[Service], None], state: State) -> None:
    """`tokens`: what the versions guess."""
    first, *promoted, last = tokens
    service = Service(Guessing(first))
    for token in promoted:
        service.drafter.note("v1", State.WAITING)
        learned_from = LearnedFrom().with_texts({tenant_digest("acme"): 1.0})
        service.drafter.begin("v1", replace(loaded(Guessing(token)), learned_from=learned_from))
        service.try_on()
    canary = service.begin("v2", Guessing(last))
    texts = [service.open(is_new=True), service.open()]
    for text in texts:
        service.write(text, 5)
    end(service)
    assert canary.state is state
    for text in texts:
        service.loop.detach(text)
    open_then = [weakref.ref(text) for text in texts]
    service.sent.clear()
    del text, texts
    gc.collect()
    assert [session() for session in open_then] == [None, None]
