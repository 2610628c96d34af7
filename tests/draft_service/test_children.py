"""A pass gives nodes the same children with logits on the host or on a device, and fetches few whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.drafter import ExpansionError
from draft_service.language_model import LanguageModelDrafter
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from specdec.decoding.calibration import Calibration
from specdec.decoding.draft_logits import HostDraftLogits, Shortlists
from specdec.decoding.processing import Logits
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.engine.batch import PackedBatch
from tests.draft_service.fakes import Engine

VOCABULARY, PASSES = 600, 5
PLAIN = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3), Sampling(temperature=1.0, min_p=0.02, seed=4)]


class Host(Engine):
    """An engine with logits depending on the position."""

    vocabulary = VOCABULARY
    table = np.random.default_rng(0).normal(0, 4, (32, VOCABULARY)).astype(np.float32)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.read.append(batch.tokens.tolist())
        return self.table[batch.positions[batch.wanted] % len(self.table)]


class Device(Host):
    """The same engine, with its rows on a device; some rows are fetched whole."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[int] = []  # whole rows fetched by all passes, by index in the pass

    def forward_shortlists(self, batch: PackedBatch) -> Fetched:
        return Fetched(self, self.forward(batch))


class Fetched:
    def __init__(self, device: Device, logits: Logits) -> None:
        self._device, self._on_host = device, HostDraftLogits(logits)

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        return self._on_host.shortlists(rows)

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        self._device.whole += rows
        return self._on_host.whole(rows)


def opened(
    drafter: LanguageModelDrafter, samplers: Sequence[RequestSampler], vocabulary: int = VOCABULARY
) -> list[DrafterSession]:
    """Open sessions with these samplers."""
    policy = ExpansionPolicy(max_nodes=40, max_branches=3)
    requests = [DrafterSessionRequest([1, 2, 3], [], sampler, frozenset(), 20, 100) for sampler in samplers]
    sessions = [DrafterSession(request, policy, vocabulary, Calibration()) for request in requests]
    for session in sessions:
        drafter.open(session)
    return sessions


def grown(engine: Engine, samplers: Sequence[RequestSampler], vocabulary: int = VOCABULARY) -> list[DrafterSession]:
    """Open sessions with these samplers and expand them a few times."""
    drafter = LanguageModelDrafter(engine)
    sessions = opened(drafter, samplers, vocabulary)
    for _ in range(PASSES):
        assert not drafter.expand(sessions)
    return sessions


def described(session: DrafterSession) -> list[tuple[int, int, float]]:
    return [(node.position, node.token, node.logprob) for node in session.tree.root.walk()]


SAMPLERS = [
    *(RequestSampler(sampling) for sampling in PLAIN),
    RequestSampler(Sampling(logit_bias={9: 3.0})),
    RequestSampler(Sampling(temperature=0.8, banned_tokens=frozenset({4}))),
    RequestSampler(Sampling(banned_sequences=frozenset((3, token) for token in range(0, VOCABULARY, 2)))),
    RequestSampler(Sampling(temperature=1.0), rule=Rule.REJECTION),
    RequestSampler(Sampling(), rule=Rule.CONTRASTIVE),
]


def test_trees_are_the_same_alone_and_together_here_and_on_a_device() -> None:
    together, elsewhere = grown(Host(), SAMPLERS), grown(Device(), SAMPLERS)
    for sampler, here, there in zip(SAMPLERS, together, elsewhere, strict=True):
        (alone,) = grown(Host(), [sampler])
        assert described(here) == described(there)
        assert {(position, token) for position, token, _ in described(alone)} >= {
            (position, token) for position, token, _ in described(here)
        }
        assert here.tree.size


def test_no_path_completes_a_banned_sequence() -> None:
    """Neither across the end of the text nor along the path."""
    (free,) = grown(Host(), [RequestSampler(Sampling(temperature=1.0))])
    first = next(iter(free.tree.root.children))
    second = next(iter(free.tree.root.children[first].children))
    banned = Sampling(temperature=1.0, banned_sequences=frozenset({(2, 3, first), (first, second)}))
    (session,) = grown(Host(), [RequestSampler(banned)])
    assert session.tree.root.children
    paths = [[1, 2, 3, *(step.token for step in node.path())] for node in session.tree.root.walk()]
    assert not [path for path in paths if path[-3:] == [2, 3, first] or path[-2:] == [first, second]]
    (other,) = grown(Host(), [RequestSampler(Sampling(temperature=1.0, banned_sequences=frozenset({(first, second)})))])
    assert first in other.tree.root.children
    assert second not in other.tree.root.children[first].children


def test_whole_rows_stay_on_the_device() -> None:
    device = Device()
    grown(device, [RequestSampler(sampling) for sampling in PLAIN])
    assert len(device.read) == PASSES
    assert not device.whole


@pytest.mark.parametrize("sampler", SAMPLERS[len(PLAIN) :])
def test_those_come_that_a_shortlist_does_not_replace(sampler: RequestSampler) -> None:
    device = Device()
    grown(device, [sampler])
    assert device.whole


def test_tokens_that_the_target_does_not_have_are_no_children() -> None:
    """If the shortlist contains one, the whole row is fetched."""
    known = VOCABULARY // 2
    device, samplers = Device(), [RequestSampler(sampling) for sampling in PLAIN]
    sessions = grown(device, samplers, known)
    assert device.whole
    for session, other in zip(sessions, grown(Host(), samplers, known), strict=True):
        assert session.tree.size
        assert max(token for _, token, _ in described(session)) < known
        assert described(session) == described(other)


class Failing(Device):
    """A device that fails once to send a row."""

    failures = 1

    def forward_shortlists(self, batch: PackedBatch) -> Fetched:
        return Lost(self, self.forward(batch))


class Lost(Fetched):
    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        assert isinstance(self._device, Failing)
        if self._device.failures:
            self._device.failures -= 1
            raise MemoryError
        return super().whole(rows)


@pytest.mark.parametrize("sampler", SAMPLERS[len(PLAIN) :])
def test_a_pass_whose_rows_do_not_come_is_made_up_for(sampler: RequestSampler) -> None:
    drafter = LanguageModelDrafter(Failing())
    (session,) = opened(drafter, [sampler])
    with pytest.raises(ExpansionError):
        drafter.expand([session])
    for _ in range(PASSES):
        assert not drafter.expand([session])
    (other,) = grown(Host(), [sampler])
    assert described(session) == described(other)


@pytest.mark.parametrize("name", ["query", "add_calibrated", "add_draws"])
def test_a_session_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    drafter = LanguageModelDrafter(Host())
    rule = Rule.REJECTION if name == "add_draws" else Rule.COUPLED
    failing, *others = sessions = opened(drafter, [RequestSampler(Sampling(temperature=0.8, seed=2), rule=rule)] * 3)
    assert not drafter.expand(sessions)
    sizes = [each.tree.size for each in others]
    error = RuntimeError("it fails alone")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(failing, name, fail)
    assert drafter.expand(sessions) == {failing: error}
    assert all(each.tree.size > size for each, size in zip(others, sizes, strict=True))
