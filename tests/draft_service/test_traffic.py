"""What a draft service keeps to learn from: texts that permit it, within its limit, until they are forgotten."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from draft_service.__main__ import learning_key
from draft_service.draft_loop import DraftLoop
from draft_service.forgotten import CLOCKS_APART_SECONDS, Forgotten
from draft_service.learning_servicer import MIN_KEY_CHARACTERS, key_gate
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import MAX_PLACES, DrafterSession
from draft_service.traffic import KeptText, Traffic
from specdec.decoding.calibration import Calibration
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.serving.errors import UnauthenticatedError
from specdec.serving.target_logprobs import PLACE_BYTES, TargetLogprobs
from tests.draft_service.fakes import VOCABULARY, Engine, Listener, Pod

PROMPT = [1, 2, 3]
GUESSED = 7
"""The fake engine's likeliest token everywhere."""


def session(
    tenant: str = "a", learn: bool = True, prompt: Sequence[int] = PROMPT, generated: Sequence[int] = ()
) -> DrafterSession:
    request = DrafterSessionRequest(
        list(prompt), list(generated), RequestSampler(Sampling()), frozenset(), 200, 10_000, tenant=tenant, learn=learn
    )
    return DrafterSession(request, ExpansionPolicy(max_nodes=8), VOCABULARY, Calibration())


def ended(traffic: Traffic, text: Sequence[int], **fields: object) -> DrafterSession:
    """Commit these tokens to a new session, offer it to the traffic, and return it."""
    made = session(**fields)  # type: ignore[arg-type]
    made.commit(made.tree.base, list(text))
    traffic.keep(made)
    return made


def tokens(texts: Sequence[KeptText]) -> list[list[int]]:
    return [text.tokens.tolist() for text in texts]


def test_a_text_is_kept_at_its_end_with_where_the_draft_was_wrong() -> None:
    traffic = Traffic(1000)
    pod = Pod(Engine())
    loop = DraftLoop(pod.drafter, traffic)
    text = session()
    Listener(loop, text)
    for committed in ([GUESSED, GUESSED], [5], [GUESSED, 6]):
        while loop.turn() is not None:
            pass
        loop.commit(text, text.tree.base, committed, 0.0)
    assert traffic.texts() == []
    loop.detach(text)
    loop.detach(text)  # detached again: kept once
    (kept,) = traffic.texts()
    assert kept.tokens.tolist() == [*PROMPT, GUESSED, GUESSED, 5, GUESSED, 6]
    assert (kept.tenant, kept.prompt, kept.overruled.tolist()) == ("a", 3, [5, 7])


@pytest.mark.parametrize(("learn", "text"), [(False, [4, 5]), (True, [])])
def test_nothing_is_kept_without_permission_or_without_a_text(learn: bool, text: list[int]) -> None:
    traffic = Traffic(1000)
    ended(traffic, text, learn=learn)
    assert traffic.texts() == []


@given(lengths=st.lists(st.integers(1, 12), max_size=20), most=st.integers(4, 30))
def test_the_last_tokens_are_kept(lengths: list[int], most: int) -> None:
    """As many of the last texts as fit are kept whole; if the last one alone is too long, its end is kept."""
    traffic = Traffic(most)
    for number, length in enumerate(lengths):
        ended(traffic, [number % VOCABULARY] * length)
    expected: list[list[int]] = []
    for number, length in reversed(list(enumerate(lengths))):
        text = [*PROMPT, *[number % VOCABULARY] * length][-most:]
        if sum(map(len, expected)) + len(text) > most:
            break
        expected.insert(0, text)
    assert tokens(traffic.texts()) == expected
    assert traffic.kept().tokens == sum(map(len, expected))
    assert all(
        text.prompt == max(0, 3 - (3 + length - len(text.tokens)))
        for text, length in zip(traffic.texts(), lengths[len(lengths) - len(expected) :], strict=True)
    )


def at(position: int) -> TargetLogprobs:
    """Return log-probabilities at a place, different from those at other places."""
    return TargetLogprobs(position, np.array([position, 0], np.uint32), np.array([-0.5, -1.5], np.float16))


@given(
    lengths=st.lists(st.integers(1, 12), max_size=20),
    most=st.integers(4, 40),
    most_places=st.integers(0, 20),
    forgets=st.integers(0, 20),
)
def test_log_probabilities_stay_within_their_bytes(
    lengths: list[int], most: int, most_places: int, forgets: int
) -> None:
    """The latest texts keep theirs, whatever becomes of older texts."""
    traffic = Traffic(most, most_bytes=most_places * PLACE_BYTES + 3)
    expected: list[tuple[int, list[int]]] = []  # number of a text, positions of its places
    for number, length in enumerate(lengths):
        text = session(tenant="ab"[number % 2])
        text.commit(3, [number % VOCABULARY] * length)
        text.add_places([at(position) for position in range(3, 3 + length, 2)])
        if number == forgets:
            traffic.forget("a")
            expected = [(other, places) for other, places in expected if other % 2]
        assert traffic.keep(text)
        cut = max(0, 3 + length - most)
        own = [position - cut for position in range(3, 3 + length, 2) if position >= cut]
        expected.append((number, own[max(0, len(own) - most_places) :]))
        kept = traffic.texts()
        expected = expected[len(expected) - len(kept) :]
        while sum(len(places) for _, places in expected) > most_places:
            oldest = next(index for index, (_, places) in enumerate(expected) if places)
            expected[oldest] = (expected[oldest][0], [])
        assert [text.places.positions.tolist() for text in kept] == [places for _, places in expected]
        assert traffic.kept().logprob_bytes == PLACE_BYTES * sum(len(places) for _, places in expected)


@pytest.mark.parametrize(
    ("most", "labelled"),
    [(100, [3, 5, 6]), (6, [3, 5, 6]), (4, [6])],  # an overlong beginning is just evicted
)
def test_a_text_is_kept_once_however_often_its_session_is_opened(most: int, labelled: list[int]) -> None:
    """Sessions that do not pay are closed, and opened again later."""
    now = 1.0
    traffic = Traffic(most, clock=lambda: now, most_bytes=100 * PLACE_BYTES)
    written = list[int]()
    for new in ([4, 5], [6], [7, 8]):
        part = session(generated=written)
        part.commit(part.tree.base, new)
        part.overruled = [3 + len(written)]
        part.add_places([at(3 + len(written))])
        written += new
        assert traffic.keep(part)
        now += 1.0
    whole = [*PROMPT, *written]
    cut = max(0, len(whole) - most)
    (text,) = traffic.texts()
    assert (text.tokens.tolist(), text.prompt) == (whole[cut:], max(0, 3 - cut))
    labels = [place - cut for place in labelled]
    assert text.overruled.tolist() == text.places.positions.tolist() == labels
    assert text.kept_at == 3.0
    kept = traffic.kept()
    assert (kept.tokens, kept.logprob_bytes) == (len(whole) - cut, len(labels) * PLACE_BYTES)


def test_equal_texts_of_other_requests_and_tenants_stay_apart() -> None:
    traffic = Traffic(1000)
    ended(traffic, [4, 5])
    ended(traffic, [4, 5])
    ended(traffic, [6], tenant="b", generated=[4, 5])
    ended(traffic, [5, 6], prompt=[*PROMPT, 4], generated=[5])
    ended(traffic, [6], generated=[4, 4])
    assert len(traffic.texts()) == 5
    ended(traffic, [6], generated=[4, 5])
    assert tokens(traffic.texts())[-1] == [*PROMPT, 4, 5, 6]
    assert len(traffic.texts()) == 5


def test_a_text_that_ends_after_the_session_was_opened_is_another_request_s() -> None:
    traffic = Traffic(1000)
    ended(traffic, [4, 5, 6])
    ended(traffic, [5, 6, 7], generated=[4])
    assert tokens(traffic.texts()) == [[*PROMPT, 4, 5, 6], [*PROMPT, 4, 5, 6, 7]]


def test_a_text_keeps_its_first_places_and_each_once() -> None:
    text = session()
    text.commit(3, [GUESSED] * 100)
    text.add_places([at(5), at(7)])
    text.add_places([at(6), at(7), at(8)])
    assert [place.position for place in text.places] == [5, 7, 8]
    text.add_places([at(position) for position in range(9, 9 + 2 * MAX_PLACES)])
    assert len(text.places) == MAX_PLACES


def test_what_is_forgotten_is_gone_and_running_texts_are_not_kept() -> None:
    traffic = Traffic(1000)
    ended(traffic, [4, 5])
    ended(traffic, [6], tenant="b")
    running, other = session(), session("b")
    assert traffic.keeps(running)
    traffic.forgotten.add("a")
    assert not traffic.keeps(running)
    assert traffic.forget("a") == (1, 5)
    assert traffic.forget("a") == (0, 0)
    for text in (running, other):
        text.commit(3, [9])
        traffic.keep(text)
    assert tokens(traffic.texts()) == [[*PROMPT, 6], [*PROMPT, 9]]
    assert {text.tenant for text in traffic.texts()} == {"b"}


def test_a_tenant_may_permit_learning_again() -> None:
    """Its texts are kept again once they certainly began afterwards by the clocks of all machines."""
    now = [0.0]
    traffic = Traffic(1000, Forgotten(clock=lambda: now[0]))
    for age, kept in ((CLOCKS_APART_SECONDS - 100, 0), (CLOCKS_APART_SECONDS + 100, 1)):
        now[0] = session().begun - age
        traffic.forgotten = Forgotten(clock=lambda: now[0])
        traffic.forgotten.add("a")
        ended(traffic, [4])
        assert tokens(traffic.texts()) == [[*PROMPT, 4]] * kept


def test_a_text_counts_from_its_request_whenever_its_session_is_opened() -> None:
    """A text that runs while its tenant is forgotten may be opened again at another draft, minutes later."""
    traffic = Traffic(1000, Forgotten(clock=lambda: time.time() - 2 * CLOCKS_APART_SECONDS))
    traffic.forgotten.add("a")
    for age, kept in ((3 * CLOCKS_APART_SECONDS, False), (0.0, True)):
        request = replace(session().request, age=age)
        reopened = DrafterSession(request, ExpansionPolicy(max_nodes=8), VOCABULARY, Calibration())
        assert traffic.keeps(reopened) is kept


KEY = "k" * MIN_KEY_CHARACTERS


@pytest.mark.parametrize(
    ("method", "metadata", "passes"),
    [
        ("/specdec.v2.LearningService/GetTraffic", (("authorization", f"Bearer {KEY}"),), True),
        ("/specdec.v2.LearningService/GetTraffic", (("authorization", f"bearer  {KEY} "),), True),
        ("/specdec.v2.LearningService/GetTraffic", (("authorization", f"Bearer {KEY[1:]}"),), False),
        ("/specdec.v2.LearningService/GetTraffic", (("authorization", KEY),), False),
        ("/specdec.v2.LearningService/GetTraffic", 2 * (("authorization", f"Bearer {KEY}"),), False),
        ("/specdec.v2.LearningService/Forget", (), False),
        ("/specdec.v2.LearningService/Forget", (("authorization", b"\xff"),), False),
        ("/specdec.v2.DraftService/Draft", (), True),
    ],
)
def test_who_has_the_key(method: str, metadata: tuple[tuple[str, str | bytes], ...], passes: bool) -> None:
    gate = key_gate(KEY)
    if passes:
        gate(method, metadata)
    else:
        with pytest.raises(UnauthenticatedError):
            gate(method, metadata)


def test_the_key_is_needed_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert learning_key(None, keeps=False, tries=True) is None
    file.write_text(f"{KEY}\n")
    assert learning_key(file, keeps=False, tries=False) is None
    assert learning_key(file, keeps=True, tries=False) == KEY
    assert learning_key(file, keeps=False, tries=True) == KEY
    for content in ("short", "two lines of key\nand more", "\u00e9" * 20):
        file.write_text(content)
        with pytest.raises(typer.BadParameter, match="key: "):
            learning_key(file, keeps=True, tries=False)
    with pytest.raises(typer.BadParameter, match="is needed with --learn-tokens"):
        learning_key(None, keeps=True, tries=False)
    with pytest.raises(typer.BadParameter, match="nowhere"):
        learning_key(tmp_path / "nowhere", keeps=True, tries=False)
