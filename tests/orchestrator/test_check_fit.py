"""A pod is fit if its range of protocol versions overlaps with ours."""

from __future__ import annotations

import pytest

from orchestrator.pods.errors import UnfitError, check_fit
from specdec.serving.identity import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from specdec.v2 import model_pb2
from tests.orchestrator.samples import MODEL


def identity(newest: int, oldest: int) -> model_pb2.ModelIdentity:
    return model_pb2.ModelIdentity(
        protocol_version=newest,
        oldest_protocol_version=oldest,
        tokenizer_fingerprint=MODEL.tokenizer_fingerprint,
        context_tokens=64,
    )


@pytest.mark.parametrize(
    ("newest", "oldest"),
    [
        (PROTOCOL_VERSION, 0),  # a pod without a range
        (PROTOCOL_VERSION, PROTOCOL_VERSION),
        (PROTOCOL_VERSION + 3, OLDEST_PROTOCOL_VERSION),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION),
        (OLDEST_PROTOCOL_VERSION, 1),
    ],
)
def test_one_version_in_common_is_enough(newest: int, oldest: int) -> None:
    check_fit(identity(newest, oldest), MODEL, "draft")


@pytest.mark.parametrize(
    ("newest", "oldest", "told"),
    [
        (PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1, f"{PROTOCOL_VERSION + 1} to {PROTOCOL_VERSION + 2}"),
        (PROTOCOL_VERSION + 1, 0, str(PROTOCOL_VERSION + 1)),
        (OLDEST_PROTOCOL_VERSION - 1, 0, str(OLDEST_PROTOCOL_VERSION - 1)),
        (0, 0, "0"),
    ],
)
def test_none_in_common_is_told_with_both(newest: int, oldest: int, told: str) -> None:
    with pytest.raises(UnfitError) as refused:
        check_fit(identity(newest, oldest), MODEL, "draft")
    assert str(refused.value.error) == f"draft: speaks protocol {told}, not {PROTOCOL_VERSION}"
