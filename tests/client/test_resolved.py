"""The resolved request has all that a text needs to be resumed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from specdec.client.completion import ReasoningPosition, Resolved, read_chunk
from specdec.v2 import generation_pb2 as pb


def test_every_field_of_the_message_has_its_place() -> None:
    of_message = {field.name for field in pb.ResolvedRequest.DESCRIPTOR.fields} - {"sampling"}
    assert of_message <= {field.name for field in fields(Resolved)}


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        (pb.Reasoning(opening_token=0, closing_token=5), ReasoningPosition(0, 5, begun=False)),
        (pb.Reasoning(opening_token=4, closing_token=0, begun=True), ReasoningPosition(4, 0, begun=True)),
        (pb.Reasoning(none=True), None),
        (None, None),
    ],
)
def test_the_reasoning_of_a_text(message: pb.Reasoning | None, reasoning: ReasoningPosition | None) -> None:
    chunk = read_chunk(pb.GenerateResponse(resolved=pb.ResolvedRequest(max_tokens=1, reasoning=message)))
    assert chunk.resolved is not None
    assert chunk.resolved.reasoning == reasoning
