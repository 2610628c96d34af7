"""Which revision serves a request, and what becomes of a revision removed from the file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from specdec.serving.errors import InvalidRequestError, PeerLostError, UnknownModelError
from specdec.v2 import generation_pb2
from tests.orchestrator.samples import MODEL
from tests.stack import until


def revision(model: str, name: str = "", share: float = 1.0) -> Revision:
    return Revision(replace(MODEL, name=model), Peers(Pods()), name=name, share=share)


def asked(catalog: Catalog, model: str) -> str:
    chosen = catalog.choose(generation_pb2.GenerateRequest(model=model))
    return chosen.asked_as or chosen.model.name


def test_a_single_model_needs_no_name() -> None:
    catalog = Catalog([revision("big")])
    assert asked(catalog, "") == asked(catalog, "big") == "big"


def test_a_model_has_several_names() -> None:
    model = replace(MODEL, name="big", aliases=("gpt-4o", "o"))
    catalog = Catalog([Revision(model, Peers(Pods()))])
    for name in ("", "big", "gpt-4o", "o"):
        assert asked(catalog, name) == catalog.main(name).model.name == "big"
    with pytest.raises(UnknownModelError, match="must be one of 'big', 'gpt-4o', 'o'"):
        catalog.main("gpt")


def test_a_request_names_a_model_or_a_revision() -> None:
    catalog = Catalog([revision("big", "a"), revision("big", "b", 0.0), revision("small", "c"), revision("x@y")])
    assert asked(catalog, "big") == "big@a"
    assert asked(catalog, "big@b") == "big@b"  # a revision without a share, named explicitly
    assert asked(catalog, "small") == "small@c"
    assert asked(catalog, "x@y") == "x@y"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("huge", "model: is 'huge', must be one of 'big', 'small'"),
        ("huge@a", "model: is 'huge@a', must be one of 'big', 'small'"),
        ("big@c", "model: is 'big@c', must be one of 'big@a', 'big@b'"),
        ("big@", "model: is 'big@', must be one of 'big@a', 'big@b'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(model: str, why: str) -> None:
    catalog = Catalog([revision("big", "a"), revision("big", "b"), revision("small", "c")])
    with pytest.raises(UnknownModelError) as refused:
        catalog.choose(generation_pb2.GenerateRequest(model=model))
    assert str(refused.value) == why


def test_a_request_among_several_models_has_to_name_one() -> None:
    catalog = Catalog([revision(f"model-{i}") for i in range(10)])
    with pytest.raises(InvalidRequestError, match=r"model: is empty, must be one of 'model-0', .*'model-7' and 2 more"):
        catalog.choose(generation_pb2.GenerateRequest())


def test_a_long_name_is_not_repeated() -> None:
    with pytest.raises(UnknownModelError) as unknown:
        Catalog([revision("big")]).choose(generation_pb2.GenerateRequest(model="x" * 10**6))
    assert len(str(unknown.value)) < 200


def test_a_text_that_is_resumed_goes_to_the_revision_that_it_was_begun_with() -> None:
    old, new = revision("big", "a", 0.0), revision("big", "b", 1.0)
    catalog = Catalog([old, new])
    old.readiness.served("f1")
    resumed = generation_pb2.GenerateRequest(model="big", model_fingerprint="f1", generated_tokens=[1])
    assert catalog.choose(resumed) is old
    resumed.model_fingerprint = "f2"  # no revision is known to have this fingerprint
    assert catalog.choose(resumed) is new


def test_a_model_stands_for_the_revision_with_the_largest_share() -> None:
    catalog = Catalog([revision("big", "a", 1.0), revision("big", "b", 3.0), revision("big", "c", 2.0)])
    assert catalog.main("big").name == catalog.main("").name == "b"
    assert catalog.main("big@a").name == "a"


async def test_a_revision_leaves_when_its_last_request_has_ended() -> None:
    old, new = revision("big", "a"), revision("big", "b")
    catalog = Catalog([old])
    with old.request("default"):
        catalog.become([new])
        assert asked(catalog, "big") == "big@b"
        assert list(catalog.leaving) == [old]
        assert catalog.counts()["big", "a"].running_requests == 1
    await until(lambda: not list(catalog.leaving))
    assert catalog.counts()["big", "a"].by_class.total() == 1  # a counter never falls
    await catalog.close()


async def test_a_revision_that_comes_back_counts_on() -> None:
    catalog = Catalog([revision("big", "a")])
    for name in ("b", "a"):
        with catalog.main("big").request("default"):
            pass
        catalog.become([revision("big", name)])
    with catalog.main("big").request("default"):
        pass
    assert catalog.counts()["big", "a"].by_class.total() == 2
    await catalog.close()


async def test_former_revisions_are_remembered_as_one_sum() -> None:
    """A rollout may go on for years."""
    catalog = Catalog([revision("big", "a")])
    for _ in range(5):
        with catalog.main("big").request("default"):
            pass
        catalog.become([revision("big", "a")])
        await until(lambda: not list(catalog.leaving))
    assert len(catalog._left) == 1
    assert catalog.counts()["big", "a"].by_class.total() == 5
    await catalog.close()


@pytest.mark.parametrize(
    ("name", "lost"), [("big", True), ("big@b", True), ("gone", True), ("gone@a", True), ("big@a", False)]
)
def test_what_cannot_be_read_here_may_be_served_elsewhere(name: str, lost: bool) -> None:
    """The error makes a client retry at another orchestrator; an unknown model would end the request."""
    catalog = Catalog([revision("big", "a", 0.0)])
    catalog.missing = [("big", "b"), ("gone", "a")]
    request = generation_pb2.GenerateRequest(model=name)
    if lost:
        with pytest.raises(PeerLostError, match="cannot read its directory") as caught:
            catalog.choose(request)
        assert caught.value.reason == "MODEL_UNREADABLE"
    else:
        assert catalog.choose(request).name == "a"
    for unknown in ("big@c", "gone@b", "other"):
        with pytest.raises(UnknownModelError):
            catalog.choose(generation_pb2.GenerateRequest(model=unknown))
    with pytest.raises(InvalidRequestError, match="'big', 'gone'"):
        catalog.choose(generation_pb2.GenerateRequest())


def test_a_model_of_which_a_part_is_left_is_served() -> None:
    catalog = Catalog([revision("big", "a", 1.0)])
    catalog.missing = [("big", "b")]
    assert asked(catalog, "big") == "big@a"
    assert asked(catalog, "") == "big@a"


def test_without_a_name_the_only_model_is_meant_also_if_it_cannot_be_read() -> None:
    catalog = Catalog([revision("big", "b", 0.0)])
    catalog.missing = [("big", "a")]
    with pytest.raises(PeerLostError, match="'big' is configured, but"):
        catalog.choose(generation_pb2.GenerateRequest())
